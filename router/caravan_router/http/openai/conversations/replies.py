"""Parameters, errors and replies that the routes of conversations share."""

from aiohttp import web

from caravan_dialects.api.openai.conversations.schema import ConversationObject
from caravan_dialects.conversations.nodes import Head
from caravan_router.http.openai.conversations.access import ID
from caravan_router.http.server.json_reply import json_reply
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
    """Return a conversation."""
    reply = ConversationObject(
        id=head.id, created_at=int(head.created), metadata=head.metadata, head=head.position.version
    )
    return tagged_reply(reply, head)


def tagged_reply(reply: object, head: Head) -> web.Response:
    """Return what a conversation has at ``head``, with an ``ETag`` that ``If-Match`` takes."""
    return json_reply(reply, ETag=f'"{head.position.version}"')
