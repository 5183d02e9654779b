"""Bodies and replies of ``/v1/conversations``. Unknown fields are ignored, as on ``/v1/responses``."""

from typing import Annotated, Any, Literal

import msgspec

from caravan_dialects.api.openai.responses.schema import Item, Metadata

Count = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class ConversationObject(msgspec.Struct, frozen=True, kw_only=True):
    """``head``: names the place where the conversation ends. A change with it in ``If-Match`` fails if it has moved."""

    id: str
    created_at: int
    metadata: Metadata
    head: str
    object: str = "conversation"


class DeletedConversation(msgspec.Struct, frozen=True):
    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The exact tokens of the last prompt and output, for the model file of this ``fingerprint``."""

    fingerprint: str
    token_ids: list[TokenId]


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """A whole conversation, for this or another server. ``tokens``: null if they are not known."""

    items: list[Item]
    metadata: Metadata
    tokens: Tokens | None = None
    object: Literal["conversation.export"] = "conversation.export"
    version: Literal[1] = 1


class CreateConversation(msgspec.Struct, frozen=True, kw_only=True, rename={"imported": "import"}):
    """``import``: an export, in place of ``items``. ``metadata``: by default that of the export."""

    items: list[Item] | None = None
    metadata: Metadata | None = None
    imported: Export | None = None


class UpdateConversation(msgspec.Struct, frozen=True, kw_only=True):
    metadata: Metadata | None = None


class CreateItems(msgspec.Struct, frozen=True, kw_only=True):
    items: list[Item]


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """``at``: the last item or response of the fork; null for all. A response under way counts as far as it has come.

    ``metadata``: by default that of the conversation.
    """

    at: str | None = None
    metadata: Metadata | None = None


class Rewind(msgspec.Struct, frozen=True, kw_only=True):
    """``to``: the item that becomes the last one. ``turns``: how many turns to take back. One of them is set."""

    to: str | None = None
    turns: Count | None = None


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """Keeps the system messages at the start and the next ``keep`` items, and drops the ``drop`` items after these."""

    keep: Count = 0
    drop: Count


class Insert(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="insert"):
    """``after``: the item before the new ones; null for the start."""

    items: list[Item]
    after: str | None = None


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="replace"):
    item: str
    items: list[Item]


class Delete(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", tag="delete"):
    item: str


class Edit(msgspec.Struct, frozen=True, kw_only=True):
    """The ``operations`` happen one after another; all of them, or none."""

    operations: Annotated[list[Insert | Replace | Delete], msgspec.Meta(max_length=1000)]


StoredItem = dict[str, Any]
