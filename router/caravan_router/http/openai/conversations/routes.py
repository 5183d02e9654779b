"""``/v1/conversations`` as OpenAI has it."""

from collections.abc import Sequence

from aiohttp import web

from caravan_dialects.api.errors import UnknownEntryError
from caravan_dialects.api.openai.conversations.edits import appended, imported, placed
from caravan_dialects.api.openai.conversations.schema import (
    ConversationObject,
    CreateConversation,
    CreateItems,
    DeletedConversation,
    StoredItem,
    UpdateConversation,
)
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.items import item_list, page_of, read_items
from caravan_dialects.api.openai.responses.rules import one_of_fields_error
from caravan_dialects.api.openai.responses.schema import ItemList
from caravan_dialects.api.openai.responses.validation import check_metadata
from caravan_dialects.conversations.nodes import Chain, Json
from caravan_router.http.openai.conversations import access
from caravan_router.http.openai.conversations.access import (
    CHANGE_ERRORS,
    IF_MATCH,
    ITEM_NAMED,
    NAMED,
    ONE,
    PATH,
    conversation_reply,
    tagged_reply,
)
from caravan_router.http.openai.responses import PAGE_PARAMETERS
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.route import BODY_ERRORS, STORE_ERRORS, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.tags import Tag

_ITEM = f"{ONE}/items/{{item_id}}"


ROUTES = Routes(OPENAI, tolerance=Tolerance.ALWAYS, tag=Tag.RESPONSES)


@ROUTES.route(
    "POST",
    PATH,
    "Create a conversation, with items or from an export",
    reply=ConversationObject,
    errors=(*BODY_ERRORS, 503),
)
async def create_conversation(request: web.Request, body: CreateConversation) -> web.Response:
    check_metadata(body.metadata)
    if body.imported is None:
        placement = placed(Chain(), read_items("items", body.items or (), {}))
        return conversation_reply(await access.create(request, body.metadata or {}, *placement))
    if body.items is not None:
        raise one_of_fields_error("items", "import")
    metadata = body.imported.metadata if body.metadata is None else body.metadata
    check_metadata(metadata)
    return conversation_reply(await access.create(request, metadata, *imported(body.imported)))


@ROUTES.route(
    "GET", ONE, "Return a conversation and its head", parameters=(NAMED,), reply=ConversationObject, errors=STORE_ERRORS
)
async def get_conversation(request: web.Request) -> web.Response:
    return conversation_reply(await access.head_of(request))


@ROUTES.route(
    "POST",
    ONE,
    "Set the metadata of a conversation",
    parameters=(NAMED, IF_MATCH),
    reply=ConversationObject,
    errors=CHANGE_ERRORS,
)
async def update_conversation(request: web.Request, body: UpdateConversation) -> web.Response:
    check_metadata(body.metadata)
    return conversation_reply(await access.change_metadata(request, body.metadata or {}))


@ROUTES.route(
    "DELETE",
    ONE,
    "Delete a conversation; its responses stay",
    parameters=(NAMED, IF_MATCH),
    reply=DeletedConversation,
    errors=(*STORE_ERRORS, 409),
)
async def delete_conversation(request: web.Request) -> web.Response:
    await access.delete(request)
    return json_reply(DeletedConversation(request.match_info[access.ID]))


@ROUTES.route(
    "GET",
    f"{ONE}/items",
    "List the items of a conversation, newest first",
    parameters=(NAMED, *PAGE_PARAMETERS),
    reply=ItemList,
    errors=(400, *STORE_ERRORS),
)
async def list_items(request: web.Request) -> web.Response:
    head, chain = await access.conversation_of(request)
    return tagged_reply(page_of(request.query, chain.items), head)


@ROUTES.route(
    "POST",
    f"{ONE}/items",
    "Add items to the end of a conversation",
    parameters=(NAMED, IF_MATCH),
    reply=ItemList,
    errors=CHANGE_ERRORS,
)
async def create_items(request: web.Request, body: CreateItems) -> web.Response:
    head, before, after = await access.change_items(request, appended(body.items))
    return tagged_reply(item_list(after[len(before) :]), head)


@ROUTES.route(
    "GET",
    _ITEM,
    "Return an item of a conversation",
    parameters=(NAMED, ITEM_NAMED),
    reply=StoredItem,
    errors=STORE_ERRORS,
)
async def get_item(request: web.Request) -> web.Response:
    head, chain = await access.conversation_of(request)
    item_id = request.match_info["item_id"]
    item = next((item for item in chain.items if item["id"] == item_id), None)
    if item is None:
        raise UnknownEntryError("item", item_id)
    return tagged_reply(item, head)


@ROUTES.route(
    "DELETE",
    _ITEM,
    "Delete an item of a conversation",
    parameters=(NAMED, ITEM_NAMED, IF_MATCH),
    reply=ConversationObject,
    errors=(*STORE_ERRORS, 409),
)
async def delete_item(request: web.Request) -> web.Response:
    item_id = request.match_info["item_id"]

    def without(items: Sequence[Json]) -> Sequence[Json]:
        left = [item for item in items if item["id"] != item_id]
        if len(left) == len(items):
            raise UnknownEntryError("item", item_id)
        return left

    return conversation_reply((await access.change_items(request, without))[0])
