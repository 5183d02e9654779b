"""Caravan's own routes of conversations: fork, rewind, shift, edit and export."""

from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.openai.conversations.edits import Change, edited, exported, index_of, rewound, shifted
from caravan_dialects.api.openai.conversations.schema import ConversationObject, Edit, Export, Fork, Rewind, Shift
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.running import RunningResponse
from caravan_dialects.api.openai.responses.validation import check_metadata
from caravan_dialects.conversations.nodes import Chain, Node, Position, new_id
from caravan_router.http.openai.conversations import access
from caravan_router.http.openai.conversations.access import (
    CHANGE_ERRORS,
    IF_MATCH,
    NAMED,
    ONE,
    conversation_reply,
    tagged_reply,
)
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.route import STORE_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import RUNNING, owner_of
from caravan_router.http.server.tags import Tag

ROUTES = Routes(
    OPENAI,
    tolerance=Tolerance.ALWAYS,
    parameters=(NAMED, IF_MATCH),
    reply=ConversationObject,
    errors=CHANGE_ERRORS,
    tag=Tag.RESPONSES,
)


@ROUTES.route(
    "POST",
    f"{ONE}/fork",
    "Fork a conversation: create a new one with all of its items, or those up to a given one",
    parameters=(NAMED,),
)
async def fork_conversation(request: web.Request, body: Fork) -> web.Response:
    """A fork does not change the conversation, so that a response may be under way."""
    check_metadata(body.metadata)
    if body.at is None:
        head = await access.head_of(request)
        position, node = head.position, None
    else:
        # Found before the chain is read: a response that ends meanwhile is in neither if the chain comes first.
        running = _running(request, body.at)
        head, chain = await access.conversation_of(request)
        position, node = _forked(chain, body.at, running)
    metadata = head.metadata if body.metadata is None else body.metadata
    return conversation_reply(await access.create(request, metadata, position, node))


def _running(request: web.Request, response_id: str) -> RunningResponse | None:
    """Return the response of this id if it is under way and extends the conversation that the path names."""
    found = request.app[RUNNING].find(owner_of(request), response_id)
    return found if found is not None and found.conversation == request.match_info[access.ID] else None


def _forked(chain: Chain, at: str, running: RunningResponse | None) -> tuple[Position, Node | None]:
    """Return where a fork ends, and the node to add for it if it forks a response that is ``running``."""
    for node in chain.nodes:
        if node.id == at:
            return Position(node=node.id, items=len(node.items)), None
    if running is not None:
        node = replace(running.progress.node(), id=new_id("node"), response=b"")
        return (Position(node=node.id, items=len(node.items)), node) if node.items else (node.parent, None)
    return chain.after(index_of("at", chain.items, at) + 1), None


@ROUTES.route("POST", f"{ONE}/rewind", "Remove the last items or turns of a conversation")
async def rewind_conversation(request: web.Request, body: Rewind) -> web.Response:
    return await _changed(request, rewound(body))


@ROUTES.route("POST", f"{ONE}/shift", "Drop the items that follow the first ones of a conversation")
async def shift_conversation(request: web.Request, body: Shift) -> web.Response:
    return await _changed(request, shifted(body))


@ROUTES.route("POST", f"{ONE}/edit", "Insert, replace and delete items of a conversation")
async def edit_conversation(request: web.Request, body: Edit) -> web.Response:
    return await _changed(request, edited(body))


async def _changed(request: web.Request, change: Change) -> web.Response:
    return conversation_reply((await access.change_items(request, change))[0])


@ROUTES.route(
    "GET",
    f"{ONE}/export",
    "Export a conversation with its exact tokens, to import it here or elsewhere",
    parameters=(NAMED,),
    reply=Export,
    errors=STORE_ERRORS,
)
async def export_conversation(request: web.Request) -> web.Response:
    head, chain = await access.conversation_of(request)
    return tagged_reply(exported(head, chain), head)
