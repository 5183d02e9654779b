"""``/v1/conversations`` as OpenAI has it."""

from collections.abc import Sequence

import msgspec
from aiohttp import web

from caravan_router.conversations.nodes import Chain, Json
from caravan_router.http.openai.conversations import access
from caravan_router.http.openai.conversations.branches import BRANCH_ROUTES
from caravan_router.http.openai.conversations.edits import appended, placed
from caravan_router.http.openai.conversations.replies import (
    CHANGE_ERRORS,
    IF_MATCH,
    ITEM_NAMED,
    NAMED,
    ONE,
    PATH,
    conversation_reply,
    tagged_reply,
)
from caravan_router.http.openai.conversations.schema import (
    ConversationObject,
    CreateConversation,
    CreateItems,
    DeletedConversation,
    StoredItem,
    UpdateConversation,
)
from caravan_router.http.openai.conversations.transfer import imported
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.responses.items import read_items
from caravan_router.http.openai.responses.pages import PAGE_PARAMETERS, item_list, page_of
from caravan_router.http.openai.responses.rules import OneOfFieldsError
from caravan_router.http.openai.responses.schema import ItemList
from caravan_router.http.openai.responses.validation import check_metadata
from caravan_router.http.server.errors import UnknownEntryError
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS, JSON, STORE_ERRORS, Route
from caravan_router.http.server.tolerant_body import read_tolerant_body

_CREATE = msgspec.json.Decoder(CreateConversation)
_UPDATE = msgspec.json.Decoder(UpdateConversation)
_ITEMS = msgspec.json.Decoder(CreateItems)
_ITEM = f"{ONE}/items/{{item_id}}"


async def create_conversation(request: web.Request) -> web.Response:
    """Handle ``POST /v1/conversations``."""
    body = await read_tolerant_body(request, _CREATE, CreateConversation)
    check_metadata(body.metadata)
    if body.imported is None:
        placement = placed(Chain(), read_items("items", body.items or (), {}))
        return conversation_reply(await access.create(request, body.metadata or {}, *placement))
    if body.items is not None:
        raise OneOfFieldsError("items", "import")
    metadata = body.imported.metadata if body.metadata is None else body.metadata
    check_metadata(metadata)
    return conversation_reply(await access.create(request, metadata, *imported(body.imported)))


async def get_conversation(request: web.Request) -> web.Response:
    """Handle ``GET /v1/conversations/{conversation_id}``."""
    return conversation_reply((await access.conversation_of(request))[0])


async def update_conversation(request: web.Request) -> web.Response:
    """Handle ``POST /v1/conversations/{conversation_id}``."""
    body = await read_tolerant_body(request, _UPDATE, UpdateConversation)
    check_metadata(body.metadata)
    return conversation_reply(await access.change_metadata(request, body.metadata or {}))


async def delete_conversation(request: web.Request) -> web.Response:
    """Handle ``DELETE /v1/conversations/{conversation_id}``."""
    await access.delete(request)
    return json_reply(DeletedConversation(request.match_info[access.ID]))


async def list_items(request: web.Request) -> web.Response:
    """Handle ``GET /v1/conversations/{conversation_id}/items``."""
    head, chain = await access.conversation_of(request)
    return tagged_reply(page_of(request, chain.items), head)


async def create_items(request: web.Request) -> web.Response:
    """Handle ``POST /v1/conversations/{conversation_id}/items``."""
    body = await read_tolerant_body(request, _ITEMS, CreateItems)
    head, before, after = await access.change_items(request, appended(body.items))
    return tagged_reply(item_list(after[len(before) :]), head)


async def get_item(request: web.Request) -> web.Response:
    """Handle ``GET /v1/conversations/{conversation_id}/items/{item_id}``."""
    head, chain = await access.conversation_of(request)
    item_id = request.match_info["item_id"]
    item = next((item for item in chain.items if item["id"] == item_id), None)
    if item is None:
        raise UnknownEntryError("item", item_id)
    return tagged_reply(item, head)


async def delete_item(request: web.Request) -> web.Response:
    """Handle ``DELETE /v1/conversations/{conversation_id}/items/{item_id}``."""
    item_id = request.match_info["item_id"]

    def without(items: Sequence[Json]) -> Sequence[Json]:
        left = [item for item in items if item["id"] != item_id]
        if len(left) == len(items):
            raise UnknownEntryError("item", item_id)
        return left

    return conversation_reply((await access.change_items(request, without))[0])


ROUTES = (
    Route(
        method="POST",
        path=PATH,
        handler=create_conversation,
        dialect=OPENAI,
        summary="Create a conversation, with items or from an export",
        body=(CreateConversation,),
        replies=((JSON, ConversationObject),),
        errors=(*BODY_ERRORS, 503),
    ),
    Route(
        method="GET",
        path=ONE,
        handler=get_conversation,
        dialect=OPENAI,
        summary="Return a conversation and its head",
        parameters=(NAMED,),
        replies=((JSON, ConversationObject),),
        errors=STORE_ERRORS,
    ),
    Route(
        method="POST",
        path=ONE,
        handler=update_conversation,
        dialect=OPENAI,
        summary="Set the metadata of a conversation",
        parameters=(NAMED, IF_MATCH),
        body=(UpdateConversation,),
        replies=((JSON, ConversationObject),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="DELETE",
        path=ONE,
        handler=delete_conversation,
        dialect=OPENAI,
        summary="Forget a conversation; its responses stay",
        parameters=(NAMED, IF_MATCH),
        replies=((JSON, DeletedConversation),),
        errors=(*STORE_ERRORS, 409),
    ),
    Route(
        method="GET",
        path=f"{ONE}/items",
        handler=list_items,
        dialect=OPENAI,
        summary="List the items of a conversation, the newest first",
        parameters=(NAMED, *PAGE_PARAMETERS),
        replies=((JSON, ItemList),),
        errors=(400, *STORE_ERRORS),
    ),
    Route(
        method="POST",
        path=f"{ONE}/items",
        handler=create_items,
        dialect=OPENAI,
        summary="Add items to the end of a conversation",
        parameters=(NAMED, IF_MATCH),
        body=(CreateItems,),
        replies=((JSON, ItemList),),
        errors=CHANGE_ERRORS,
    ),
    Route(
        method="GET",
        path=_ITEM,
        handler=get_item,
        dialect=OPENAI,
        summary="Return an item of a conversation",
        parameters=(NAMED, ITEM_NAMED),
        replies=((JSON, StoredItem),),
        errors=STORE_ERRORS,
    ),
    Route(
        method="DELETE",
        path=_ITEM,
        handler=delete_item,
        dialect=OPENAI,
        summary="Delete an item of a conversation",
        parameters=(NAMED, ITEM_NAMED, IF_MATCH),
        replies=((JSON, ConversationObject),),
        errors=(*STORE_ERRORS, 409),
    ),
    *BRANCH_ROUTES,
)
