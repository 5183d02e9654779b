"""Turns: the items of a request, and the stored response or conversation that they continue."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from caravan_dialects.api.errors import HeadMovedError, NotStoredError, UnknownEntryError, UnknownPreviousError
from caravan_dialects.api.openai.responses.items import check_size, read_items
from caravan_dialects.api.openai.responses.rules import two_contexts_error
from caravan_dialects.api.openai.responses.running import RunningResponses
from caravan_dialects.api.openai.responses.schema import ConversationName, InputFields
from caravan_dialects.conversations.local import LocalResponses, whole
from caravan_dialects.conversations.nodes import Chain, Head, JobEnd, Json, Node, Position, Transaction
from caravan_dialects.conversations.store import Store, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The ``items`` of a request, and the ``chain`` that they continue. ``head``: the conversation that they extend.

    ``held``: what keeps others from changing the conversation, and the store from removing the chain. ``local``: what
    keeps responses that are not stored; None if nothing does. ``is_local``: whether the chain is one of these.
    """

    store: Store
    owner: str
    chain: Chain
    head: Head | None
    items: tuple[Json, ...]
    held: ExitStack
    local: LocalResponses | None = None
    is_local: bool = False

    @property
    def all_items(self) -> list[Json]:
        """The items that the turn continues, and its own."""
        return [*self.chain.items, *self.items]

    async def commit(self, node: Node, ended: JobEnd | None = None) -> None:
        """Store the turn as ``node`` and let others continue it. ``ended``: the job that ends with it.

        Raises HeadMovedError, NotStoredError.
        """
        if self.is_local:
            node = whole(self.chain, node)
        try:
            committed = await self._written(node, ended)
            if not committed and self.head is None and not self.is_local:
                # Another server has removed what the turn continues: that it is in use is known here only.
                committed = await self._written(whole(self.chain, node), ended)
        except StoreError as error:
            raise NotStoredError from error
        if not committed:
            raise HeadMovedError
        self.held.close()

    async def _written(self, node: Node, ended: JobEnd | None) -> bool:
        head, moved = self.head, None
        if head is not None:
            moved = replace(head, position=Position(node=node.id, items=len(node.items)))
        expected = None if head is None else head.position
        transaction = Transaction(node=node, head=moved, expected=expected, moves=head is not None, ended=ended)
        return await self.store.commit(self.owner, transaction)

    def keep(self, node: Node) -> None:
        """Let the connection, if there is one, continue the turn, which is not stored."""
        if self.local is not None:
            self.local.keep(self.chain, node)


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunBefore:
    """A turn that goes on: its ``items``, and the ``position`` that it continues; None if that is not known."""

    items: tuple[Json, ...]
    position: Position | None


def conversation_id(body: InputFields) -> str | None:
    """Return the id of the conversation that a request names."""
    return body.conversation.id if isinstance(body.conversation, ConversationName) else body.conversation


@asynccontextmanager
async def begun_turn(
    store: Store,
    running: RunningResponses,
    owner: str,
    body: InputFields,
    *,
    extends: bool,
    before: BegunBefore | None = None,
    local: LocalResponses | None = None,
) -> AsyncIterator[Turn]:
    """Read what ``body`` continues. ``extends``: the block extends the conversation, if the body names one.

    ``owner``: name of the API key that sent it. ``before``: of a turn that goes on, which continues what it did before,
    also if its conversation has moved since. ``local``: see `Turn`.

    Raises UnknownPreviousError, UnknownEntryError, ConversationBusyError, HeadMovedError, ValidationError, StoreError.
    """
    previous, conversation = body.previous_response_id, conversation_id(body)
    chain, head, is_local = Chain(), None, False
    position = None if before is None else before.position
    with ExitStack() as held:
        if previous is not None and conversation is not None:
            raise two_contexts_error()
        if previous is not None:
            held.enter_context(store.pinning(previous))
            kept = None if local is None else local.find(previous)
            is_local = kept is not None
            if (found := kept or await store.chain(owner, position or previous)) is None:
                raise UnknownPreviousError(previous)
            chain = found
        if conversation is not None:
            if extends:
                held.enter_context(running.extending(owner, conversation))
            held.enter_context(store.pinning(conversation))
            if (named := await store.conversation(owner, conversation)) is None:
                raise UnknownEntryError("conversation", conversation)
            head, chain = named
            if position is not None and position != head.position:
                if (found := await store.chain(owner, position)) is None:
                    raise HeadMovedError
                head, chain = replace(head, position=position), found
        if before is not None:
            items = before.items
        else:
            items = read_items("input", body.input or "", {item["id"]: item for item in chain.items})
            check_size("input", items, chain.size)
        yield Turn(
            store=store,
            owner=owner,
            chain=chain,
            head=head,
            items=items,
            held=held,
            local=local,
            is_local=is_local,
        )
