"""``/v1/responses``: create, read, delete and cancel."""

import msgspec
from aiohttp import web

from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.models import asked_model
from caravan_router.http.generation.permits import check_rate
from caravan_router.http.generation.rules import UnsupportedFieldError
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.responses.pages import PAGE_PARAMETERS, page_of
from caravan_router.http.openai.responses.reply import ResponseReply
from caravan_router.http.openai.responses.running import RUNNING
from caravan_router.http.openai.responses.schema import (
    DeletedResponse,
    InputFields,
    InputTokenCount,
    ItemList,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
)
from caravan_router.http.openai.responses.tools import offered_tools
from caravan_router.http.openai.responses.turn import begun_turn
from caravan_router.http.openai.responses.validation import check_request, validate_turn
from caravan_router.http.server.errors import UnknownEntryError
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import (
    BODY_ERRORS,
    EVENTS,
    GENERATION_ERRORS,
    JSON,
    STORE_ERRORS,
    Parameter,
    Route,
)
from caravan_router.http.server.state import CLIENT, STATE, owner_of
from caravan_router.http.server.tolerant_body import IGNORED, read_tolerant_body

_REQUEST = msgspec.json.Decoder(ResponseRequest)
_INPUT = msgspec.json.Decoder(InputFields)
_PATH = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
_ID = Parameter(name="response_id", place="path", description="Id of a response")


async def create_response(request: web.Request) -> web.StreamResponse:
    """Handle ``POST /v1/responses``."""
    body = await read_tolerant_body(request, _REQUEST, ResponseRequest)
    check_request(body)
    async with begun_turn(request, body, extends=True) as turn:
        reply = ResponseReply(body, turn)
        for kind in reply.skipped_tools:
            request.app[IGNORED].note(f"tools of {_PATH}", kind)
        with request.app[RUNNING].listing(reply.running):
            return await answer(request, reply)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Handle ``POST /v1/responses/input_tokens``."""
    body = await read_tolerant_body(request, _INPUT, InputFields)
    if body.prompt is not None:
        raise UnsupportedFieldError("prompt", "send `instructions` and `input`", body.prompt)
    check_rate(request[CLIENT])
    async with begun_turn(request, body, extends=False) as turn:
        context = await context_of(request, asked_model(request, body.model))
        valid = await validate_turn(context, body, turn, offered_tools(body.tools or ()))
    return json_reply(InputTokenCount(len(valid.chat.request.prompt)))


async def get_response(request: web.Request) -> web.Response:
    """Handle ``GET /v1/responses/{response_id}``."""
    response_id, owner = request.match_info["response_id"], owner_of(request)
    if request.query.get("stream") == "true":
        raise UnsupportedFieldError("stream", "read the response whole", True)
    chain = await request.app[STATE].store.response(owner, response_id)
    if chain is not None:
        return web.Response(body=chain.nodes[-1].response, content_type="application/json")
    running = request.app[RUNNING].find(owner, response_id)
    if running is None:
        raise UnknownEntryError("response", response_id)
    return json_reply(running.progress.response())


async def delete_response(request: web.Request) -> web.Response:
    """Handle ``DELETE /v1/responses/{response_id}``."""
    response_id, owner = request.match_info["response_id"], owner_of(request)
    if not await request.app[STATE].store.delete_response(owner, response_id):
        raise UnknownEntryError("response", response_id)
    return json_reply(DeletedResponse(response_id))


async def cancel_response(request: web.Request) -> web.Response:
    """Handle ``POST /v1/responses/{response_id}/cancel``. A response that has ended is returned as it is."""
    response_id, owner = request.match_info["response_id"], owner_of(request)
    running = request.app[RUNNING].find(owner, response_id)
    if running is None:
        return await get_response(request)
    running.cancel()
    await running.ended.wait()
    return json_reply(running.progress.response())


async def list_input_items(request: web.Request) -> web.Response:
    """Handle ``GET /v1/responses/{response_id}/input_items``."""
    response_id, owner = request.match_info["response_id"], owner_of(request)
    chain = await request.app[STATE].store.response(owner, response_id)
    if chain is None:
        raise UnknownEntryError("response", response_id)
    outputs = len(chain.nodes[-1].items) - chain.nodes[-1].inputs
    return json_reply(page_of(request, chain.items[: len(chain.items) - outputs]))


ROUTES = (
    Route(
        method="POST",
        path=_PATH,
        handler=create_response,
        dialect=OPENAI,
        summary="Answer a turn with messages and calls of tools, and keep it, so that it can be continued",
        body=(ResponseRequest,),
        replies=((JSON, ResponseObject), (EVENTS, ResponseEvent)),
        errors=(*GENERATION_ERRORS, 409),
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=count_input_tokens,
        dialect=OPENAI,
        summary="Return how many tokens the prompt of a response has",
        body=(InputFields,),
        replies=((JSON, InputTokenCount),),
        errors=(*BODY_ERRORS, 404, 429, 503),
    ),
    Route(
        method="GET",
        path=_ONE,
        handler=get_response,
        dialect=OPENAI,
        summary="Return a response",
        parameters=(_ID, Parameter(name="stream", place="query", description="Must not be `true`")),
        replies=((JSON, ResponseObject),),
        errors=(400, *STORE_ERRORS),
    ),
    Route(
        method="DELETE",
        path=_ONE,
        handler=delete_response,
        dialect=OPENAI,
        summary="Forget a response; what continues it stays",
        parameters=(_ID,),
        replies=((JSON, DeletedResponse),),
        errors=STORE_ERRORS,
    ),
    Route(
        method="POST",
        path=f"{_ONE}/cancel",
        handler=cancel_response,
        dialect=OPENAI,
        summary="End a response that is under way, with what it has",
        parameters=(_ID,),
        replies=((JSON, ResponseObject),),
        errors=(400, *STORE_ERRORS),
    ),
    Route(
        method="GET",
        path=f"{_ONE}/input_items",
        handler=list_input_items,
        dialect=OPENAI,
        summary="List the items that a response answers, the newest first",
        parameters=(_ID, *PAGE_PARAMETERS),
        replies=((JSON, ItemList),),
        errors=(400, *STORE_ERRORS),
    ),
)
