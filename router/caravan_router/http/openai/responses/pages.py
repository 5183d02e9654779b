"""Pages of items, as OpenAI's lists have them."""

from collections.abc import Sequence

from aiohttp import web

from caravan_router.conversations.nodes import Json
from caravan_router.http.generation.checks import check_range
from caravan_router.http.generation.rules import UnsupportedFieldError
from caravan_router.http.openai.responses.rules import UnknownItemError
from caravan_router.http.openai.responses.schema import ItemList
from caravan_router.http.server.route import Parameter

_LIMIT, _MAX_LIMIT = 20, 100

PAGE_PARAMETERS = (
    Parameter(name="after", place="query", description="Id of the item before the first one of the page"),
    Parameter(name="limit", place="query", description=f"Most items of the page: 1 to {_MAX_LIMIT}, default {_LIMIT}"),
    Parameter(name="order", place="query", description="`desc`, the newest first (default), or `asc`"),
)


def page_of(request: web.Request, items: Sequence[Json]) -> ItemList:
    """Return the page of ``items``, the oldest first, that the query asks for. Raises ValidationError."""
    order = request.query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise UnsupportedFieldError("order", "use `asc` or `desc`", order)
    limit = request.query.get("limit", str(_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
        raise UnsupportedFieldError("limit", f"use 1 to {_MAX_LIMIT}", limit)
    check_range("limit", int(limit), 1, _MAX_LIMIT)
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := request.query.get("after")) is not None:
        place = next((at for at, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise UnknownItemError("after", after)
        ordered = ordered[place + 1 :]
    return item_list(ordered[: int(limit)], more=len(ordered) > int(limit))


def item_list(items: Sequence[Json], *, more: bool = False) -> ItemList:
    """Return a page of these items. ``more``: whether others follow."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return ItemList(list(items), first, last, more)
