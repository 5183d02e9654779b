"""Ollama's routes that add models: pulled from a hub, copied, or made of others; each tells its steps."""

import contextlib
import time
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import web

from caravan_dialects.api import stream
from caravan_dialects.api.errors import CatalogueRefusalError, UnknownModelError
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.errors import OLLAMA, catalogue_errors
from caravan_dialects.api.ollama.recipe import NO_RECIPE, changed_recipe, recipe_of, stored_recipe
from caravan_dialects.api.ollama.schema import OllamaDeleteRequest, OllamaPullReply, OllamaPullRequest
from caravan_dialects.api.ollama.validation import bare_name, check_ranges
from caravan_router.http.generation.models import catalogue_of
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.route import BODY_ERRORS, JSON, LINES, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core.catalogue import Catalogue, MadeModel, PullProgress, Stock

_NOT_HONOURED = {
    "quantize": "pull a repository's model with this quantisation",
    "files": "put the file into --models-dir",
    "adapters": "give the shards --lora",
    "template": "the chat template of the file is used",
    "messages": "send them with each request",
}


async def send_steps(
    request: web.Request, steps: AsyncGenerator[OllamaPullReply, None], *, streamed: bool
) -> web.StreamResponse:
    """Send a line for each step, or only the last one, once all is done.

    Raises CatalogueRefusalError where that can still be told by the status; later it is the last line.
    """
    async with contextlib.aclosing(steps):
        last = await anext(steps)
        if not streamed:
            async for step in steps:
                last = step
            return json_reply(last)
        async with EventStream(request, {}, request.app[STATE].limits, stream.LINES) as events:
            await events.send(msgspec.json.encode(last))
            try:
                async for step in steps:
                    await events.send(msgspec.json.encode(step))
            except CatalogueRefusalError as error:
                await events.send(msgspec.json.encode({"error": str(error)}))
        return events.response


def step_of(progress: PullProgress) -> OllamaPullReply:
    """Return the line that tells how far a download is."""
    what = "verifying" if progress.is_checking else "pulling"
    return OllamaPullReply(
        status=f"{what} {progress.digest[:12]}",
        digest=f"sha256:{progress.digest}",
        total=progress.size,
        completed=progress.done,
    )


ROUTES = Routes(OLLAMA, any_type=True, operator=True, tag=Tag.OLLAMA)


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


@ROUTES.route("POST", "/api/copy", "Give a model another name, which survives a restart", errors=(*BODY_ERRORS, 404))
async def copy(request: web.Request, body: ollama.OllamaCopyRequest) -> web.Response:
    """Raises NoCatalogueError, UnknownModelError, CatalogueRefusalError."""
    catalogue, source = catalogue_of(request.app[STATE]), bare_name(body.source)
    if catalogue.find(source) is None:
        raise UnknownModelError(body.source)
    made = _made(catalogue, bare_name(body.destination), source, None)
    async with contextlib.aclosing(_making(catalogue, made)) as steps:
        async for _ in steps:
            pass
    return web.Response()


@ROUTES.route(
    "POST",
    "/api/create",
    "Create a model from another one, with its own options and system message; streams lines of JSON unless `stream` "
    "is false",
    replies=((JSON, ollama.OllamaPullReply), (LINES, ollama.OllamaPullReply)),
    errors=(*BODY_ERRORS, 404),
)
async def create(request: web.Request, body: ollama.OllamaCreateRequest) -> web.StreamResponse:
    """Raises NoCatalogueError, CatalogueRefusalError, CatalogueFailedError, ValidationError."""
    for field, instead in _NOT_HONOURED.items():
        if given := getattr(body, field):
            raise unsupported_field_error(field, f"set it to null: {instead}", given)
    if body.parameters is not None:
        check_ranges(body.parameters, "parameters.")
    catalogue = catalogue_of(request.app[STATE])
    made = _made(catalogue, bare_name(body.model or body.name), bare_name(body.from_), body)
    return await send_steps(request, _making(catalogue, made), streamed=body.stream is not False)


def _made(catalogue: Catalogue, name: str, source: str, body: ollama.OllamaCreateRequest | None) -> MadeModel:
    """Return a model of ``source``, which has what that has, if it was made itself, and what ``body`` says."""
    before = catalogue.made(source)
    recipe = NO_RECIPE if before is None else recipe_of(before.recipe)
    if body is not None:
        recipe = changed_recipe(recipe, body)
    return MadeModel(name, source if before is None else before.base, stored_recipe(recipe), time.time())


async def _making(catalogue: Catalogue, made: MadeModel) -> AsyncGenerator[ollama.OllamaPullReply, None]:
    with catalogue_errors():
        async with contextlib.aclosing(catalogue.stock.make(made)) as told:
            async for progress in told:
                yield step_of(progress)
    yield ollama.OllamaPullReply(status="success")
