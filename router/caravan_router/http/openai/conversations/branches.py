"""Caravan's own routes of conversations: fork, rewind, shift, edit and export."""

from dataclasses import replace

import msgspec
from aiohttp import web

from caravan_router.conversations.ids import new_id
from caravan_router.conversations.nodes import Chain, Node, Position
from caravan_router.http.openai.conversations import access
from caravan_router.http.openai.conversations.edits import Change, edited, index_of, rewound, shifted
from caravan_router.http.openai.conversations.replies import (
    CHANGE_ERRORS,
    IF_MATCH,
    NAMED,
    ONE,
    conversation_reply,
    tagged_reply,
)
from caravan_router.http.openai.conversations.schema import ConversationObject, Edit, Export, Fork, Rewind, Shift
from caravan_router.http.openai.conversations.transfer import exported
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.responses.running import RUNNING, RunningResponse
from caravan_router.http.openai.responses.validation import check_metadata
from caravan_router.http.server.route import JSON, STORE_ERRORS, Route
from caravan_router.http.server.state import owner_of
from caravan_router.http.server.tolerant_body import read_tolerant_body

_FORK = msgspec.json.Decoder(Fork)
_REWIND = msgspec.json.Decoder(Rewind)
_SHIFT = msgspec.json.Decoder(Shift)
_EDIT = msgspec.json.Decoder(Edit)


async def fork_conversation(request: web.Request) -> web.Response:
    """Handle ``POST .../fork``. It does not change the conversation, so that a response may be under way."""
    body = await read_tolerant_body(request, _FORK, Fork)
    check_metadata(body.metadata)
    # Found before the chain is read: a response that ends meanwhile is in neither if the chain comes first.
    running = _running(request, body.at)
    head, chain = await access.conversation_of(request)
    position, node = _forked(chain, body.at, running)
    metadata = head.metadata if body.metadata is None else body.metadata
    return conversation_reply(await access.create(request, metadata, position, node))


def _running(request: web.Request, response_id: str | None) -> RunningResponse | None:
    """Return the response of this id if it is under way and extends the conversation that the path names."""
    if response_id is None:
        return None
    found = request.app[RUNNING].find(owner_of(request), response_id)
    return found if found is not None and found.conversation == request.match_info[access.ID] else None


def _forked(chain: Chain, at: str | None, running: RunningResponse | None) -> tuple[Position, Node | None]:
    """Return where a fork ends, and the node to add for it if it forks a response that is ``running``."""
    if at is None:
        return chain.position, None
    for node in chain.nodes:
        if node.id == at:
            return Position(node=node.id, items=len(node.items)), None
    if running is not None:
        node = replace(running.progress.node(), id=new_id("node"), response=b"")
        return (Position(node=node.id, items=len(node.items)), node) if node.items else (node.parent, None)
    return chain.after(index_of("at", chain.items, at) + 1), None


async def rewind_conversation(request: web.Request) -> web.Response:
    """Handle ``POST .../rewind``."""
    return await _changed(request, rewound(await read_tolerant_body(request, _REWIND, Rewind)))


async def shift_conversation(request: web.Request) -> web.Response:
    """Handle ``POST .../shift``."""
    return await _changed(request, shifted(await read_tolerant_body(request, _SHIFT, Shift)))


async def edit_conversation(request: web.Request) -> web.Response:
    """Handle ``POST .../edit``."""
    return await _changed(request, edited(await read_tolerant_body(request, _EDIT, Edit)))


async def _changed(request: web.Request, change: Change) -> web.Response:
    return conversation_reply((await access.change_items(request, change))[0])


async def export_conversation(request: web.Request) -> web.Response:
    """Handle ``GET .../export``."""
    head, chain = await access.conversation_of(request)
    return tagged_reply(exported(head, chain), head)


BRANCH_ROUTES = (
    Route(
        method="POST",
        path=f"{ONE}/fork",
        handler=fork_conversation,
        dialect=OPENAI,
        summary="Begin a new conversation with the items of this one, all or up to one of them",
        parameters=(NAMED,),
        body=(Fork,),
        replies=((JSON, ConversationObject),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{ONE}/rewind",
        handler=rewind_conversation,
        dialect=OPENAI,
        summary="Take back the last items or turns of a conversation",
        parameters=(NAMED, IF_MATCH),
        body=(Rewind,),
        replies=((JSON, ConversationObject),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{ONE}/shift",
        handler=shift_conversation,
        dialect=OPENAI,
        summary="Drop items after the first ones of a conversation",
        parameters=(NAMED, IF_MATCH),
        body=(Shift,),
        replies=((JSON, ConversationObject),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{ONE}/edit",
        handler=edit_conversation,
        dialect=OPENAI,
        summary="Insert, replace and delete items of a conversation",
        parameters=(NAMED, IF_MATCH),
        body=(Edit,),
        replies=((JSON, ConversationObject),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="GET",
        path=f"{ONE}/export",
        handler=export_conversation,
        dialect=OPENAI,
        summary="Return a conversation with its exact tokens, to be imported here or elsewhere",
        parameters=(NAMED,),
        replies=((JSON, Export),),
        errors=STORE_ERRORS,
    ),
)
