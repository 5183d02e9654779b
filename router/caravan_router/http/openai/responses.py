"""``/v1/responses``: generates, returns, cancels and deletes responses."""

import asyncio
import re
from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import NoCompactionError, NoEventsError, ResponseEndedError, UnknownEntryError
from caravan_dialects.api.generation.prompt import RenderedTokens, rendered_tokens
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.openai.chat.validation import ValidChat
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.background import check_background, stored_response
from caravan_dialects.api.openai.responses.event_log import EventLog
from caravan_dialects.api.openai.responses.items import DEFAULT_LIMIT, MAX_LIMIT, page_of
from caravan_dialects.api.openai.responses.reply import AskedResponse
from caravan_dialects.api.openai.responses.rules import starting_after_error
from caravan_dialects.api.openai.responses.running import RunningResponse
from caravan_dialects.api.openai.responses.schema import (
    DeletedResponse,
    InputFields,
    InputTokenCount,
    ItemList,
    ResponseEvent,
    ResponseObject,
    ResponseRequest,
)
from caravan_dialects.api.openai.responses.tool_loop import offered_without_loop
from caravan_dialects.api.openai.responses.turn import Turn, begun_turn
from caravan_dialects.api.openai.responses.validation import check_request, validate_turn
from caravan_dialects.conversations.store import Store
from caravan_router.http.generation.answer import REMEMBERED, answer
from caravan_router.http.generation.models import asked_model, context_of, counting_refusals, reading_texts
from caravan_router.http.openai.background import BACKGROUND, followed, note_skipped
from caravan_router.http.openai.websocket.connection import answer_socket
from caravan_router.http.server.body import Tolerance
from caravan_router.http.server.repeated import REPEATABLE, keyed_id
from caravan_router.http.server.route import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    STORE_ERRORS,
    Parameter,
    json_reply,
)
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import RUNNING, STATE, owner_of
from caravan_router.http.server.tags import Tag

_PATH = "/v1/responses"
_ONE = "/v1/responses/{response_id}"
# Of an event.
_NUMBER = re.compile(r"-1|[0-9]{1,15}")
# Between two looks at a response that another server is to cancel.
_POLL_S = 0.1


PAGE_PARAMETERS = (
    Parameter(name="after", place="query", description="Id of the item before the first one of the page"),
    Parameter(
        name="limit",
        place="query",
        description=f"Maximum number of items per page: 1 to {MAX_LIMIT}, default {DEFAULT_LIMIT}",
    ),
    Parameter(name="order", place="query", description="`desc`, the newest first (default), or `asc`"),
)


_ID = Parameter(name="response_id", place="path", description="Id of a response")


class _Ended(msgspec.Struct, frozen=True):
    """What a stored response says of its end."""

    status: str


ROUTES = Routes(OPENAI, tolerance=Tolerance.ALWAYS, tag=Tag.RESPONSES)
# Paths of OpenAI that openapi.json does not describe.
UNSUPPORTED = Routes(OPENAI, tolerance=Tolerance.ALWAYS, tag=Tag.RESPONSES)


@ROUTES.route(
    "POST",
    _PATH,
    "Generate a response of messages and tool calls, and store it so that it can be continued",
    around=counting_refusals,
    parameters=(REPEATABLE,),
    reply=ResponseObject,
    events=ResponseEvent,
    errors=(*GENERATION_ERRORS, 409),
)
async def create_response(request: web.Request, body: ResponseRequest) -> web.StreamResponse:
    check_request(body)
    check_background(body)
    if body.background:
        response_id = keyed_id(request, "resp")
        if response_id is not None and await _is_stored(request, response_id):
            return await (_stream_again if body.stream else _now)(request, owner_of(request), response_id)
        queued, log = await request.app[BACKGROUND].begin(request, body, response_id)
        return await followed(request, log, 0) if body.stream else json_reply(queued)
    async with _begun_turn(request, body, extends=True) as turn:
        reply = AskedResponse(body, turn, request.app[REMEMBERED])
        note_skipped(request.app, reply)
        with request.app[RUNNING].listing(reply.running):
            return await answer(request, reply)


ROUTES.also("/responses", "unversioned")


@ROUTES.route(
    "GET",
    _PATH,
    "Open a WebSocket connection for responses",
    errors=(400, 426, 503),
)
async def open_socket(request: web.Request) -> web.StreamResponse:
    return await answer_socket(request)


ROUTES.also("/responses", "unversioned")


def _begun_turn(request: web.Request, body: InputFields, *, extends: bool) -> AbstractAsyncContextManager[Turn]:
    return begun_turn(request.app[STATE].store, request.app[RUNNING], owner_of(request), body, extends=extends)


@ROUTES.route(
    "POST",
    "/v1/responses/input_tokens",
    "Count the prompt tokens of a response",
    around=reading_texts,
    reply=InputTokenCount,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def count_input_tokens(request: web.Request, body: InputFields) -> web.Response:
    return json_reply(InputTokenCount(len((await _valid_chat(request, body)).request.prompt)))


ROUTES.also("/responses/input_tokens", "unversioned")


@ROUTES.route(
    "POST",
    "/v1/responses/render",
    "Return the prompt tokens of a response, as in vLLM",
    around=reading_texts,
    reply=RenderedTokens,
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def render_response(request: web.Request, body: InputFields) -> web.Response:
    chat = await _valid_chat(request, body)
    return json_reply(rendered_tokens(chat.model, chat.request.prompt))


@UNSUPPORTED.route("POST", "/v1/responses/compact", "Not supported: the answer says what to do instead")
async def compact_response(request: web.Request) -> web.StreamResponse:
    """It would otherwise be taken for the id of a response."""
    raise NoCompactionError


async def _valid_chat(request: web.Request, body: InputFields) -> ValidChat:
    """Return a turn that is not answered. Raises RequestError, EngineError."""
    if body.prompt is not None:
        raise unsupported_field_error("prompt", "send `instructions` and `input`", body.prompt)
    async with _begun_turn(request, body, extends=False) as turn:
        context = await context_of(request, asked_model(request, body.model))
        offered = await offered_without_loop(context, body, turn)
        return (await validate_turn(context, body, turn, offered)).chat


@ROUTES.route(
    "GET",
    _ONE,
    "Return a response",
    parameters=(
        _ID,
        Parameter(
            name="stream", place="query", description="`true`: return the events of a response with `background`"
        ),
        Parameter(
            name="starting_after", place="query", description="`sequence_number` of the event before the first one"
        ),
    ),
    reply=ResponseObject,
    events=ResponseEvent,
    errors=(400, *STORE_ERRORS),
)
async def get_response(request: web.Request) -> web.StreamResponse:
    response_id, owner = request.match_info["response_id"], owner_of(request)
    if request.query.get("stream") == "true":
        return await _stream_again(request, owner, response_id)
    return await _now(request, owner, response_id)


async def _now(request: web.Request, owner: str, response_id: str) -> web.StreamResponse:
    """Return a response as it is now."""
    stored = await _find_stored(request, owner, response_id)
    if stored is not None:
        return web.Response(body=stored, content_type="application/json")
    running = request.app[RUNNING].find(owner, response_id)
    if running is None:
        raise UnknownEntryError("response", response_id)
    return json_reply(running.response())


async def _is_stored(request: web.Request, response_id: str) -> bool:
    store, owner = request.app[STATE].store, owner_of(request)
    return await store.job(owner, response_id) is not None or await store.response(owner, response_id) is not None


async def _find_stored(request: web.Request, owner: str, response_id: str) -> bytes | None:
    """Return a response as it is stored; None if there is none of this id, or it is under way here."""
    store = request.app[STATE].store
    stored = await store.response(owner, response_id)
    if stored is None and request.app[RUNNING].find(owner, response_id) is None:
        job = await store.job(owner, response_id)
        # It may have ended since the first look.
        stored = None if job is None else stored_response(job) or await store.response(owner, response_id)
    return stored


async def _stream_again(request: web.Request, owner: str, response_id: str) -> web.StreamResponse:
    given = request.query.get("starting_after", "-1")
    if not _NUMBER.fullmatch(given):
        raise starting_after_error(given)
    store = request.app[STATE].store
    log = request.app[BACKGROUND].log_of(owner, response_id)
    if log is None:
        job = await store.job(owner, response_id)
        if job is None:
            if await store.response(owner, response_id) is None:
                raise UnknownEntryError("response", response_id)
            raise NoEventsError
        log = EventLog(store, job.id, job.next)
        log.close()
    return await followed(request, log, int(given) + 1)


@ROUTES.route(
    "DELETE",
    _ONE,
    "Delete a response; responses that continue it stay",
    parameters=(_ID,),
    reply=DeletedResponse,
    errors=STORE_ERRORS,
)
async def delete_response(request: web.Request) -> web.Response:
    response_id, owner = request.match_info["response_id"], owner_of(request)
    store = request.app[STATE].store
    if request.app[BACKGROUND].log_of(owner, response_id) is not None:
        await _cancelled(request, owner, response_id)
    elif store.is_shared:
        await _cancelled_elsewhere(store, owner, response_id)
    if not await store.delete_response(owner, response_id):
        raise UnknownEntryError("response", response_id)
    return json_reply(DeletedResponse(response_id))


@ROUTES.route(
    "POST",
    f"{_ONE}/cancel",
    "Cancel a response in progress and keep what it has generated",
    parameters=(_ID,),
    reply=ResponseObject,
    errors=(400, *STORE_ERRORS),
)
async def cancel_response(request: web.Request) -> web.StreamResponse:
    """Cancelling twice is cancelling once. Raises ResponseEndedError if the response has ended otherwise."""
    response_id, owner = request.match_info["response_id"], owner_of(request)
    running = await _cancelled(request, owner, response_id)
    if running is None:
        stored = await _find_stored(request, owner, response_id)
        if stored is None:
            raise UnknownEntryError("response", response_id)
        if (status := msgspec.json.decode(stored, type=_Ended).status) != "cancelled":
            raise ResponseEndedError(status)
        return web.Response(body=stored, content_type="application/json")
    return json_reply(running.response())


async def _cancelled(request: web.Request, owner: str, response_id: str) -> RunningResponse | None:
    """Cancel a response under way, and return it when it has ended; None if there is none of this id."""
    running = request.app[RUNNING].find(owner, response_id)
    if running is not None:
        running.cancel()
        await running.ended.wait()
    elif request.app[STATE].store.is_shared:
        await _cancelled_elsewhere(request.app[STATE].store, owner, response_id)
    return running


async def _cancelled_elsewhere(store: Store, owner: str, response_id: str) -> None:
    """Let the server that generates a response in the background cancel it, and return when it has ended."""
    if await store.on_jobs(lambda jobs: jobs.cancel(owner, response_id)):
        while not await store.on_jobs(lambda jobs: jobs.has_ended(response_id)):  # noqa: ASYNC110  another process changes it
            await asyncio.sleep(_POLL_S)


@ROUTES.route(
    "GET",
    f"{_ONE}/input_items",
    "List the input items of a response, newest first",
    parameters=(_ID, *PAGE_PARAMETERS),
    reply=ItemList,
    errors=(400, *STORE_ERRORS),
)
async def list_input_items(request: web.Request) -> web.Response:
    response_id, owner = request.match_info["response_id"], owner_of(request)
    chain = await request.app[STATE].store.chain(owner, response_id)
    if chain is None:
        raise UnknownEntryError("response", response_id)
    outputs = len(chain.nodes[-1].items) - chain.nodes[-1].inputs
    return json_reply(page_of(request.query, chain.items[: len(chain.items) - outputs]))
