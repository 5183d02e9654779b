"""Changes of the items of a conversation, each of which returns a new list with the items that stay; and exports."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import assert_never

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.openai.conversations.schema import (
    Delete,
    Edit,
    Export,
    Insert,
    Replace,
    Rewind,
    Shift,
    Tokens,
)
from caravan_dialects.api.openai.responses.item_messages import count_system, turns_of
from caravan_dialects.api.openai.responses.items import MAX_ITEMS, check_size, read_exported_item, read_items
from caravan_dialects.api.openai.responses.rules import (
    one_of_fields_error,
    repeated_item_error,
    too_many_items_error,
    unknown_item_error,
)
from caravan_dialects.conversations.nodes import START, Chain, ExactTokens, Head, Json, Node, Position, new_id
from caravan_scheduler.core.prompt_media import is_cell

# Returns the items after a change. Raises ValidationError.
Change = Callable[[Sequence[Json]], Sequence[Json]]


def index_of(field: str, items: Sequence[Json], item_id: str) -> int:
    """Return the place of an item. Raises ValidationError, which names ``field``."""
    found = next((at for at, item in enumerate(items) if item["id"] == item_id), None)
    if found is None:
        raise unknown_item_error(field, item_id)
    return found


def appended(new: Sequence[Json]) -> Change:
    return lambda items: [*items, *read_items("items", new, {item["id"]: item for item in items})]


def rewound(asked: Rewind) -> Change:
    def change(items: Sequence[Json]) -> Sequence[Json]:
        if (asked.to is None) == (asked.turns is None):
            raise one_of_fields_error("to", "turns")
        if asked.to is not None:
            return items[: index_of("to", items, asked.to) + 1]
        starts = turns_of(items)
        check_range("turns", asked.turns, 0, len(starts))
        return items[: starts[-asked.turns]] if asked.turns else items

    return change


def shifted(asked: Shift) -> Change:
    def change(items: Sequence[Json]) -> Sequence[Json]:
        kept = count_system(items) + asked.keep
        check_range("keep", asked.keep, 0, len(items) - count_system(items))
        check_range("drop", asked.drop, 0, len(items) - kept)
        return [*items[:kept], *items[kept + asked.drop :]]

    return change


def edited(asked: Edit) -> Change:
    def change(items: Sequence[Json]) -> Sequence[Json]:
        edited_items = _EditedItems(items)
        for number, operation in enumerate(asked.operations):
            field = f"operations[{number}]"
            match operation:
                case Insert(after=after):
                    at = 0 if after is None else edited_items.index_of(f"{field}.after", after) + 1
                    edited_items.replace(at, at, read_items(f"{field}.items", operation.items, edited_items.by_id))
                case Replace(item=item):
                    at = edited_items.index_of(f"{field}.item", item)
                    edited_items.replace(at, at + 1, read_items(f"{field}.items", operation.items, edited_items.by_id))
                case Delete(item=item):
                    at = edited_items.index_of(f"{field}.item", item)
                    edited_items.replace(at, at + 1, ())
                case _:
                    assert_never(operation)
        return edited_items.items

    return change


class _EditedItems:
    """The items of a conversation during an edit. An operation takes little time, also on many items."""

    def __init__(self, items: Sequence[Json]) -> None:
        self.items = list(items)
        self._ids = [item["id"] for item in items]
        self.by_id = dict(zip(self._ids, items, strict=True))

    def index_of(self, field: str, item_id: str) -> int:
        """Return the place of an item. Raises ValidationError, which names ``field``."""
        if item_id not in self.by_id:
            raise unknown_item_error(field, item_id)
        return self._ids.index(item_id)

    def replace(self, start: int, stop: int, new: Sequence[Json]) -> None:
        """Replace the items from ``start`` up to ``stop`` by ``new`` ones."""
        for item_id in self._ids[start:stop]:
            del self.by_id[item_id]
        self.items[start:stop] = new
        self._ids[start:stop] = [item["id"] for item in new]
        self.by_id |= {item["id"]: item for item in new}


def placed(chain: Chain, items: Sequence[Json]) -> tuple[Position, Node | None]:
    """Return the position at which a chain has ``items``, and the node to add for it; None if it has them already.

    What ``chain`` has before the first difference is shared with it. Raises ValidationError.
    """
    before = chain.items
    same = next((at for at, (old, new) in enumerate(zip(before, items, strict=False)) if old != new), None)
    if same is None:
        same = min(len(before), len(items))
    parent = chain.after(same)
    if same == len(items):
        return parent, None
    added, size = (items[same:], chain.size) if same == len(before) else (items, 0)
    check_size("items", added, size)
    node = Node(id=new_id("node"), parent=parent, items=tuple(items[same:]))
    return Position(node=node.id, items=len(node.items)), node


def exported(head: Head, chain: Chain) -> Export:
    """Return all that another server needs. Other branches of the same chain are not part of it."""
    tokens = chain.tokens
    return Export(
        items=chain.items,
        metadata=head.metadata,
        tokens=None if tokens is None else Tokens(fingerprint=tokens.fingerprint, token_ids=_shown(tokens.token_ids)),
    )


def _shown(tokens: Sequence[int]) -> list[int]:
    """Return the tokens up to the first picture or sound, whose cells are no tokens for others."""
    return list(takewhile(lambda token: not is_cell(token), tokens))


def imported(export: Export) -> tuple[Position, Node | None]:
    """Return a node with all items of an export, which keep their ids. Raises ValidationError.

    Its tokens need no check: they are used only as far as they stand for the text of the items.
    """
    if len(export.items) > MAX_ITEMS:
        raise too_many_items_error("import.items", MAX_ITEMS, len(export.items))
    items = tuple(read_exported_item(f"import.items[{number}]", item) for number, item in enumerate(export.items))
    seen: set[str] = set()
    for number, item in enumerate(items):
        if item["id"] in seen:
            raise repeated_item_error(f"import.items[{number}].id", item["id"])
        seen.add(item["id"])
    if not items:
        return START, None
    tokens = None
    if export.tokens is not None and export.tokens.fingerprint:
        tokens = ExactTokens(fingerprint=export.tokens.fingerprint, token_ids=tuple(export.tokens.token_ids))
    node = Node(id=new_id("node"), items=items, tokens=tokens)
    return Position(node=node.id, items=len(items)), node
