"""What the routes of conversations have in common: parameters, errors and the form of replies."""

import msgspec
from aiohttp import web

from caravan_router.conversations.nodes import Head
from caravan_router.http.openai.conversations.access import ID, shown
from caravan_router.http.server.route import BODY_ERRORS, STORE_ERRORS, Parameter

PATH = "/v1/conversations"
ONE = f"{PATH}/{{{ID}}}"

NAMED = Parameter(name=ID, place="path", description="Id of a conversation")
ITEM_NAMED = Parameter(name="item_id", place="path", description="Id of an item")
IF_MATCH = Parameter(
    name="If-Match", place="header", description="`head` of the conversation, without which nothing is changed"
)
CHANGE_ERRORS = (*BODY_ERRORS, *STORE_ERRORS, 409)


def conversation_reply(head: Head) -> web.Response:
    """Return a conversation; its ``ETag`` is what ``If-Match`` takes."""
    return json_reply(shown(head), ETag=f'"{head.position.version}"')


def json_reply(reply: msgspec.Struct, **headers: str) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), headers=headers, content_type="application/json")
