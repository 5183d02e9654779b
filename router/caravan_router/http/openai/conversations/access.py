"""Reads and changes the conversations of the client that asks."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.errors import HeadMovedError, UnknownEntryError
from caravan_dialects.api.openai.conversations.edits import Change, placed
from caravan_dialects.api.openai.conversations.schema import ConversationObject
from caravan_dialects.api.openai.responses.schema import Metadata
from caravan_dialects.conversations.nodes import START, Chain, Head, Json, Node, Position, Transaction, new_id
from caravan_router.http.server.route import BODY_ERRORS, STORE_ERRORS, Parameter, json_reply
from caravan_router.http.server.state import RUNNING, STATE, owner_of

ID = "conversation_id"
PATH = "/v1/conversations"
ONE = f"{PATH}/{{{ID}}}"


async def head_of(request: web.Request) -> Head:
    """Return the conversation that the path names. Raises UnknownEntryError."""
    conversation_id = request.match_info[ID]
    found = await request.app[STATE].store.head(owner_of(request), conversation_id)
    if found is None:
        raise UnknownEntryError("conversation", conversation_id)
    return found


async def conversation_of(request: web.Request) -> tuple[Head, Chain]:
    """Return the conversation that the path names, and its chain. Raises UnknownEntryError."""
    conversation_id = request.match_info[ID]
    found = await request.app[STATE].store.conversation(owner_of(request), conversation_id)
    if found is None:
        raise UnknownEntryError("conversation", conversation_id)
    return found


async def create(
    request: web.Request, metadata: Metadata, position: Position = START, node: Node | None = None
) -> Head:
    """Store a new conversation, with a new ``node`` if there is one. Raises HeadMovedError if its parent is gone."""
    head = Head(id=new_id("conv"), created=time.time(), position=position, metadata=metadata)
    if not await request.app[STATE].store.commit(owner_of(request), Transaction(node=node, head=head)):
        raise HeadMovedError
    return head


async def change_items(request: web.Request, change: Change) -> tuple[Head, Sequence[Json], Sequence[Json]]:
    """Change the items of the conversation that the path names; return it, and its items before and after.

    Raises UnknownEntryError, ConversationBusyError, HeadMovedError, ValidationError.
    """
    with _held(request):
        head, chain = await conversation_of(request)
        _check_expected(request, head)
        before = chain.items
        after = change(before)
        position, node = placed(chain, after)
        moved = replace(head, position=position)
        await _commit(request, Transaction(node=node, head=moved, expected=head.position, moves=True))
        return moved, before, after


async def change_metadata(request: web.Request, metadata: Metadata) -> Head:
    """Raises what `change_items` raises."""
    with _held(request):
        head = await head_of(request)
        _check_expected(request, head)
        changed = replace(head, metadata=metadata)
        await _commit(request, Transaction(head=changed, expected=head.position))
        return changed


async def delete(request: web.Request) -> None:
    """Raises what `change_items` raises."""
    with _held(request):
        head = await head_of(request)
        _check_expected(request, head)
        await request.app[STATE].store.delete_conversation(owner_of(request), head.id)


def _held(request: web.Request) -> ExitStack:
    """Keep others from changing the conversation that the path names, until the end of a block."""
    held = ExitStack()
    held.enter_context(request.app[RUNNING].extending(owner_of(request), request.match_info[ID]))
    return held


def _check_expected(request: web.Request, head: Head) -> None:
    """Require that the head is where the client expects it. Raises HeadMovedError."""
    expected = request.headers.get("If-Match")
    if expected is not None and expected.strip('" ') not in {"*", head.position.version}:
        raise HeadMovedError


async def _commit(request: web.Request, transaction: Transaction) -> None:
    if not await request.app[STATE].store.commit(owner_of(request), transaction):
        raise HeadMovedError


NAMED = Parameter(name=ID, place="path", description="Id of a conversation")


ITEM_NAMED = Parameter(name="item_id", place="path", description="Id of an item")


IF_MATCH = Parameter(
    name="If-Match", place="header", description="`head` of the conversation, without which nothing is changed"
)


CHANGE_ERRORS = (*BODY_ERRORS, *STORE_ERRORS, 409)


def conversation_reply(head: Head) -> web.Response:
    """Return a conversation."""
    reply = ConversationObject(
        id=head.id, created_at=int(head.created), metadata=head.metadata, head=head.position.version
    )
    return tagged_reply(reply, head)


def tagged_reply(reply: object, head: Head) -> web.Response:
    """Return what a conversation has at ``head``, with an ``ETag`` that ``If-Match`` takes."""
    return json_reply(reply, ETag=f'"{head.position.version}"')
