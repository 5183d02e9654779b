"""Answers one line of a batch, as its route would answer the same body."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.anthropic.reply import AskedMessage
from caravan_dialects.api.anthropic.schema import MessagesRequest
from caravan_dialects.api.error_table import Dialect
from caravan_dialects.api.generation.asked import Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.in_progress import RequestInProgress
from caravan_dialects.api.generation.permits import check_budget
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.generation.serving import Sender
from caravan_dialects.api.openai.chat.reply import AskedChat
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.completions.reply import AskedCompletions
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.embeddings import EmbeddingRequest, reply_of, texts_of, vectors_in
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.responses.reply import AskedResponse
from caravan_dialects.api.openai.responses.schema import ResponseRequest
from caravan_dialects.api.openai.responses.turn import begun_turn
from caravan_dialects.api.openai.responses.validation import check_request
from caravan_dialects.auth.client import Client
from caravan_dialects.auth.key import MIN_PRIORITY
from caravan_router.http.generation.answer import IN_PROGRESS, REMEMBERED
from caravan_router.http.generation.models import sender_context
from caravan_router.http.server.state import RUNNING, STATE


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRequest:
    """A line that is answered. ``client``: its batch's. ``request_id``: of this attempt."""

    app: web.Application
    client: Client
    endpoint: str
    request_id: str

    @property
    def owner(self) -> str:
        """Name of the API key."""
        return self.client.key.tenant.name

    def context(self, model: str) -> Awaitable[Context]:
        """Return the context for the model of this name. A line yields to every other request."""
        key = replace(self.client.key, max_priority=MIN_PRIORITY)
        sender = Sender(key=key, headers={}, request_id=self.request_id)
        return sender_context(self.app[STATE], sender, model)


async def _generated(line: LineRequest, asked: Asked) -> bytes:
    """Generate a whole reply. Raises RequestError, EngineError."""
    if asked.streamed:
        raise unsupported_field_error("stream", "leave it out in a batch", True)
    progress = RequestInProgress(
        request_id=line.request_id, owner=line.owner, route=line.endpoint, arrived=time.monotonic()
    )
    with line.app[IN_PROGRESS].listing(progress):
        async with progress.abortable():
            context = await line.context(asked.asks_for("", line.app[STATE].fleet))
            context.check_generates()
            reply = await asked.validate(context)
            progress.begin(context.served, reply)
        async with progress.generating() as runs:
            return await reply.whole(runs)


async def _chat(line: LineRequest, body: ChatRequest) -> bytes:
    return await _generated(line, AskedChat(body, line.app[STATE].limits))


async def _completion(line: LineRequest, body: CompletionRequest) -> bytes:
    return await _generated(line, AskedCompletions(body, line.app[STATE].limits))


async def _message(line: LineRequest, body: MessagesRequest) -> bytes:
    return await _generated(line, AskedMessage(body, line.request_id, line.app[REMEMBERED]))


async def _response(line: LineRequest, body: ResponseRequest) -> bytes:
    check_request(body)
    if body.background:
        raise unsupported_field_error("background", "leave it out in a batch", True)
    app = line.app
    async with begun_turn(app[STATE].store, app[RUNNING], line.owner, body, extends=True) as turn:
        asked = AskedResponse(body, turn, app[REMEMBERED])
        with app[RUNNING].listing(asked.running):
            return await _generated(line, asked)


async def _embeddings(line: LineRequest, body: EmbeddingRequest) -> bytes:
    context = await line.context(body.model or "")
    return msgspec.json.encode(reply_of(body, await vectors_in(context, partial(texts_of, body))))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A route whose requests may be lines of a batch. ``answer`` raises RequestError, EngineError."""

    dialect: Dialect
    reader: BodyReader[Any]
    answer: Callable[[LineRequest, Any], Awaitable[bytes]]


MESSAGES = "/v1/messages"
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(OPENAI, BodyReader(ChatRequest), _chat),
    "/v1/completions": Endpoint(OPENAI, BodyReader(CompletionRequest), _completion),
    "/v1/responses": Endpoint(OPENAI, BodyReader(ResponseRequest), _response),
    "/v1/embeddings": Endpoint(OPENAI, BodyReader(EmbeddingRequest), _embeddings),
    MESSAGES: Endpoint(ANTHROPIC, BodyReader(MessagesRequest), _message),
}


async def answer_line(line: LineRequest, body: msgspec.Raw) -> bytes:
    """Return the JSON of the reply to ``body``. Raises RequestError, EngineError."""
    endpoint = ENDPOINTS[line.endpoint]
    check_budget(line.client.key, line.app[STATE].accounts.spent(line.owner))
    strict = line.app[STATE].limits.strict_fields
    read, _ = endpoint.reader.read(body, exact=strict and endpoint.dialect is OPENAI)
    return await endpoint.answer(line, read)
