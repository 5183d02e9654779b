"""The routes by which clients of llama-server's router load and unload models."""

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import UnknownModelError
from caravan_dialects.api.llama_server.schema import ModelCommand, ModelEvent, ModelEventData, Success
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.generation.models import catalogue_of
from caravan_router.http.openai.models import download_told
from caravan_router.http.server.endless import until_the_end
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_scheduler.core.catalogue import CatalogueError, StateChange

ROUTES = Routes(OPENAI, any_type=True, operator=True)


@ROUTES.route(
    "POST",
    "/models/load",
    "Load a model as soon as there is room; `GET /models` reports its state",
    reply=Success,
    errors=(*BODY_ERRORS, 404),
)
async def load(request: web.Request, body: ModelCommand) -> web.Response:
    """Raises NoCatalogueError, UnknownModelError."""
    try:
        catalogue_of(request.app[STATE]).load(body.model)
    except CatalogueError:
        raise UnknownModelError(body.model) from None
    return json_reply(Success(success=True))


@ROUTES.route(
    "POST",
    "/models/unload",
    "Unload a model once its running requests have ended; the next request loads it again",
    reply=Success,
    errors=(*BODY_ERRORS, 404),
)
async def unload(request: web.Request, body: ModelCommand) -> web.Response:
    """Raises NoCatalogueError, UnknownModelError."""
    try:
        catalogue_of(request.app[STATE]).unload(body.model)
    except CatalogueError:
        raise UnknownModelError(body.model) from None
    return json_reply(Success(success=True))


@ROUTES.route("GET", "/models/sse", "Stream every change of a model's state", events=ModelEvent, errors=(404,))
async def model_changes(request: web.Request) -> web.StreamResponse:
    """Raises NoCatalogueError."""
    told = catalogue_of(request.app[STATE]).changes()
    async with EventStream(request, {}, request.app[STATE].limits) as events, until_the_end(request, told) as changes:
        async for change in changes:
            await events.send(msgspec.json.encode(_event(change)))
    return events.response


def _event(change: StateChange) -> ModelEvent:
    status = "removed" if change.state is None else change.state.value
    data = ModelEventData(status, download_told(change.download))
    return ModelEvent(model=change.name, event="status_change", data=data)
