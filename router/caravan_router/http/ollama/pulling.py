"""Ollama's routes by which operators download and delete models: ``/api/pull`` and ``/api/delete``."""

import contextlib
from collections.abc import AsyncGenerator

from aiohttp import web

from caravan_dialects.api.generation.catalogue_errors import catalogue_errors
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.ollama.schema import OllamaDeleteRequest, OllamaPullReply, OllamaPullRequest
from caravan_dialects.api.ollama.validation import bare_name
from caravan_router.http.generation.models import catalogue_of
from caravan_router.http.ollama.steps import send_steps, step_of
from caravan_router.http.server.route import BODY_ERRORS, JSON, LINES
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_scheduler.core.catalogue import Stock

ROUTES = Routes(OLLAMA, any_type=True, operator=True)


@ROUTES.route(
    "POST",
    "/api/pull",
    "Download a model and serve it on demand; streams lines of JSON unless `stream` is false",
    replies=((JSON, OllamaPullReply), (LINES, OllamaPullReply)),
    errors=(*BODY_ERRORS, 404),
)
async def pull(request: web.Request, body: OllamaPullRequest) -> web.StreamResponse:
    """Raises NoCatalogueError, CatalogueRefusalError, CatalogueFailedError, ValidationError."""
    if body.insecure:
        raise unsupported_field_error("insecure", "set it to false", body.insecure)
    steps = _steps(catalogue_of(request.app[STATE]).stock, bare_name(body.model or body.name))
    return await send_steps(request, steps, streamed=body.stream is not False)


async def _steps(stock: Stock, name: str) -> AsyncGenerator[OllamaPullReply, None]:
    with catalogue_errors():
        async with contextlib.aclosing(stock.pull(name)) as told:
            yield OllamaPullReply(status="pulling manifest")
            async for progress in told:
                yield step_of(progress)
    yield OllamaPullReply(status="success")


@ROUTES.route("DELETE", "/api/delete", "Delete a downloaded model", errors=(*BODY_ERRORS, 404))
async def delete(request: web.Request, body: OllamaDeleteRequest) -> web.Response:
    """Raises NoCatalogueError, CatalogueRefusalError, CatalogueFailedError."""
    with catalogue_errors():
        await catalogue_of(request.app[STATE]).stock.remove(bare_name(body.model or body.name))
    return web.Response()
