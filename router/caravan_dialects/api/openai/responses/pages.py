"""Pages of items, as OpenAI's lists have them."""

from collections.abc import Mapping, Sequence

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.responses.rules import unknown_item_error
from caravan_dialects.api.openai.responses.schema import ItemList
from caravan_dialects.conversations.nodes import Json

DEFAULT_LIMIT, MAX_LIMIT = 20, 100


def page_of(query: Mapping[str, str], items: Sequence[Json]) -> ItemList:
    """Return the page of ``items``, the oldest first, that a query asks for. Raises ValidationError."""
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise unsupported_field_error("order", "use `asc` or `desc`", order)
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
        raise unsupported_field_error("limit", f"use 1 to {MAX_LIMIT}", limit)
    check_range("limit", int(limit), 1, MAX_LIMIT)
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise unknown_item_error("after", after)
        ordered = ordered[place + 1 :]
    return item_list(ordered[: int(limit)], more=len(ordered) > int(limit))


def item_list(items: Sequence[Json], *, more: bool = False) -> ItemList:
    """Return a page of these items. ``more``: whether others follow."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(list(items), first, last, more)
