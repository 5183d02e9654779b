"""Exports of conversations, and their import."""

from collections.abc import Sequence
from itertools import takewhile

from caravan_dialects.api.openai.conversations.schema import Export, Tokens
from caravan_dialects.api.openai.responses.items import MAX_ITEMS, read_exported_item
from caravan_dialects.api.openai.responses.rules import repeated_item_error, too_many_items_error
from caravan_dialects.conversations.nodes import START, Chain, ExactTokens, Head, Node, Position, new_id
from caravan_scheduler.core.prompt_media import is_cell


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
