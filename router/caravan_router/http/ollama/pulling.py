"""Ollama's routes by which operators download and delete models: ``/api/pull`` and ``/api/delete``."""

import contextlib
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from caravan_router.api.errors import LibraryRefusalError
from caravan_router.api.generation.rules import unsupported_field_error
from caravan_router.api.ollama.errors import OLLAMA
from caravan_router.api.ollama.schema import OllamaDeleteRequest, OllamaPullReply, OllamaPullRequest
from caravan_router.api.ollama.validation import bare_name
from caravan_router.api.stream import LINES as LINE_FRAMING
from caravan_router.core.library import LibraryError, PullProgress, Stock
from caravan_router.http.generation.models import library_of
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS, JSON, LINES
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

ROUTES = Routes(OLLAMA, operator=True)


@ROUTES.route(
    "POST",
    "/api/pull",
    "Download a model, and serve it when a request asks for it; streams lines of JSON unless `stream` is false",
    replies=((JSON, OllamaPullReply), (LINES, OllamaPullReply)),
    errors=(*BODY_ERRORS, 404),
)
async def pull(request: web.Request, body: OllamaPullRequest) -> web.StreamResponse:
    """Raises NoLibraryError, LibraryRefusalError, ValidationError."""
    if body.insecure:
        raise unsupported_field_error("insecure", "set it to false", body.insecure)
    name = bare_name(body.model or body.name)
    steps = _steps(library_of(request.app[STATE]).stock, name)
    if body.stream is False:
        async with contextlib.aclosing(steps):
            async for _ in steps:
                pass
        return json_reply(OllamaPullReply(status="success"))
    first = await anext(steps)
    async with (
        contextlib.aclosing(steps),
        EventStream(request, {}, request.app[STATE].limits, LINE_FRAMING) as events,
    ):
        await events.send(msgspec.json.encode(first))
        try:
            async for step in steps:
                await events.send(msgspec.json.encode(step))
        except LibraryRefusalError as error:
            await events.send(msgspec.json.encode({"error": str(error)}))
    return events.response


async def _steps(stock: Stock, name: str) -> AsyncGenerator[OllamaPullReply, None]:
    try:
        async with contextlib.aclosing(stock.pull(name)) as told:
            yield OllamaPullReply(status="pulling manifest")
            async for progress in told:
                yield _reply(progress)
    except LibraryError as error:
        raise LibraryRefusalError(str(error)) from None
    yield OllamaPullReply(status="success")


def _reply(progress: PullProgress) -> OllamaPullReply:
    what = "verifying" if progress.is_checking else "pulling"
    return OllamaPullReply(
        status=f"{what} {progress.digest[:12]}",
        digest=f"sha256:{progress.digest}",
        total=progress.size,
        completed=progress.done,
    )


@ROUTES.route("DELETE", "/api/delete", "Delete a model that was downloaded", errors=(*BODY_ERRORS, 404))
async def delete(request: web.Request, body: OllamaDeleteRequest) -> web.Response:
    """Raises NoLibraryError, LibraryRefusalError."""
    try:
        await library_of(request.app[STATE]).stock.remove(bare_name(body.model or body.name))
    except LibraryError as error:
        raise LibraryRefusalError(str(error)) from None
    return web.Response()
