"""Loads and unloads LoRA adapters while the server runs, as vLLM's routes do."""

from aiohttp import web

from caravan_dialects.api.admin.rules import adapter_error
from caravan_dialects.api.admin.schema import LoadAdapterRequest, UnloadAdapterRequest
from caravan_dialects.api.errors import UnknownModelError
from caravan_dialects.api.generation.context import model_name
from caravan_dialects.api.openai.errors import OPENAI
from caravan_proto.messages.adapters import AdapterSource
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag

ROUTES = Routes(OPENAI, operator=True, tag=Tag.ADMIN)


@ROUTES.route(
    "POST",
    "/v1/load_lora_adapter",
    "Load a LoRA adapter on every shard of a model, and serve it under its name",
    replies=(("text/plain", str),),
    errors=(*BODY_ERRORS, 404, 503),
)
async def load_lora_adapter(request: web.Request, body: LoadAdapterRequest) -> web.Response:
    """Raises ValidationError, UnknownModelError, NoShardError."""
    scale = 1.0 if body.scale is None else body.scale
    source = AdapterSource(name=body.lora_name, path=body.lora_path, scale=scale)
    fleet = request.app[STATE].fleet
    model = model_name(fleet, asked_model(request, body.model))
    if problem := await fleet.adapters.load(model, source, replaces=bool(body.load_inplace)):
        raise adapter_error(problem)
    return web.Response(text=f"Success: LoRA adapter {source.name!r} added successfully.")


@ROUTES.route(
    "POST",
    "/v1/unload_lora_adapter",
    "Unload a LoRA adapter: its requests end first, and new ones are answered 404",
    replies=(("text/plain", str),),
    errors=(*BODY_ERRORS, 404),
)
async def unload_lora_adapter(request: web.Request, body: UnloadAdapterRequest) -> web.Response:
    """Raises UnknownModelError."""
    if not request.app[STATE].fleet.adapters.unload(body.lora_name):
        raise UnknownModelError(body.lora_name)
    return web.Response(text=f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
