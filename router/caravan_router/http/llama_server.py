"""llama-server's ``/completion``, ``/infill``, ``/props`` and ``/slots``."""

import msgspec
from aiohttp import web

from caravan_dialects.api.errors import NoSlotError, UnknownModelError
from caravan_dialects.api.limits import bounds_of
from caravan_dialects.api.llama_server.errors import LLAMA_SERVER
from caravan_dialects.api.llama_server.prompts import infill_prompt, joined_prompts, split_prompt
from caravan_dialects.api.llama_server.reply import AskedLlamaServer, usual_settings
from caravan_dialects.api.llama_server.schema import (
    InfillRequest,
    ListedAdapter,
    LlamaCompletion,
    LlamaCompletionRequest,
    Modalities,
    ModelCommand,
    ModelEvent,
    ModelEventData,
    Props,
    ServedContext,
    Slot,
    Success,
)
from caravan_dialects.api.openai.choices import number_of_choices
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import asked_model, catalogue_of, counting_refusals, served_model
from caravan_router.http.openai.models import download_told
from caravan_router.http.server.event_stream import EventStream, until_the_end
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core.catalogue import CatalogueError, StateChange

ROUTES = Routes(LLAMA_SERVER, any_type=True, tag=Tag.LLAMA_SERVER)
_MODEL = Parameter(name="model", place="query", description="Name of the model; left out: the default")

_Whole = LlamaCompletion | list[LlamaCompletion]


@ROUTES.route(
    "POST",
    "/completion",
    "Complete one or several prompts",
    around=counting_refusals,
    reply=_Whole,
    events=LlamaCompletion,
    errors=GENERATION_ERRORS,
)
async def llama_completion(request: web.Request, body: LlamaCompletionRequest) -> web.StreamResponse:
    limits = request.app[STATE].limits
    prompts = split_prompt(body.prompt, limits)
    n = number_of_choices(body.n, body.n_cmpl, limits)
    reply = AskedLlamaServer(body, len(prompts), n, lambda context: joined_prompts(context, prompts))
    return await answer(request, reply)


ROUTES.also("/completions", "plural")


@ROUTES.route(
    "POST",
    "/infill",
    "Return the text between a prefix and a suffix",
    around=counting_refusals,
    reply=_Whole,
    events=LlamaCompletion,
    errors=GENERATION_ERRORS,
)
async def infill(request: web.Request, body: InfillRequest) -> web.StreamResponse:
    n = number_of_choices(body.n, body.n_cmpl, request.app[STATE].limits)
    return await answer(request, AskedLlamaServer(body, 1, n, lambda context: infill_prompt(context, body)))


@ROUTES.route(
    "GET",
    "/props",
    "Return a model's context size, input modalities and chat template",
    parameters=(_MODEL,),
    reply=Props,
    errors=(404, 503),
)
async def props(request: web.Request) -> web.Response:
    state = request.app[STATE]
    model = served_model(state, asked_model(request, request.query.get("model"))).engine.model
    bounds = bounds_of(state.limits, model)
    reply = Props(
        model_alias=model.name,
        model_path=model.name,
        total_slots=state.limits.max_concurrent_requests,
        default_generation_settings=ServedContext(
            bounds.max_total_tokens, usual_settings(model.request_defaults, bounds.usual_new_tokens)
        ),
        modalities=Modalities(
            vision=model.media is not None and model.media.images, audio=model.media is not None and model.media.audio
        ),
        chat_template=model.chat_template,
        bos_token=model.bos_text,
        eos_token=model.eos_text,
        build_info=f"caravan {state.info.version}",
    )
    return json_reply(reply)


@ROUTES.route(
    "GET",
    "/slots",
    "List a slot for each generation that may be in progress, and whether it is in use",
    parameters=(Parameter(name="fail_on_no_slot", place="query", description="If present, 503 while all are in use"),),
    reply=list[Slot],
    errors=(404, 503),
)
async def slots(request: web.Request) -> web.Response:
    state = request.app[STATE]
    model = served_model(state, asked_model(request, request.query.get("model"))).engine.model
    context = bounds_of(state.limits, model).max_total_tokens
    total, busy = state.limits.max_concurrent_requests, state.permits.held
    if busy >= total and "fail_on_no_slot" in request.query:
        raise NoSlotError
    return json_reply([Slot(number, context, number < busy) for number in range(total)])


@ROUTES.route(
    "GET",
    "/lora-adapters",
    "List the LoRA adapters of a model",
    parameters=(_MODEL,),
    reply=list[ListedAdapter],
    errors=(404, 503),
)
async def lora_adapters(request: web.Request) -> web.Response:
    model = served_model(request.app[STATE], asked_model(request, request.query.get("model"))).engine.model
    return json_reply([ListedAdapter(number, name, 1.0) for number, name in enumerate(model.adapters)])


CATALOGUE_ROUTES = Routes(OPENAI, any_type=True, operator=True, tag=Tag.LLAMA_SERVER)


@CATALOGUE_ROUTES.route(
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


@CATALOGUE_ROUTES.route(
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


@CATALOGUE_ROUTES.route(
    "GET", "/models/sse", "Stream every change of a model's state", events=ModelEvent, errors=(404,)
)
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
