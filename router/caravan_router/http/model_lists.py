"""``/v1/models``, which three dialects have, and Google's ``/v1beta/models``.

Anthropic's clients send ``anthropic-version`` and get Anthropic's form, Google's send headers of their own.
"""

from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.anthropic.models import AnthropicModel, AnthropicModelList, page_of, shown_model, shown_models
from caravan_dialects.api.error_table import Dialect
from caravan_dialects.api.gemini import models as gemini
from caravan_dialects.api.gemini.errors import GEMINI
from caravan_dialects.api.gemini.schema import GeminiModel, GeminiModelList
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.schema import Model, ModelList
from caravan_router.http.generation.models import listed_models
from caravan_router.http.openai.models import SUMMARY, found, listed
from caravan_router.http.server.route import JSON, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, AppState
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core.engine import ModelFacts

VERSION_HEADER = "anthropic-version"
_VERSION = Parameter(name=VERSION_HEADER, place="header", description="If present, the reply has Anthropic's form")
_PAGE = (
    Parameter(
        name="limit", place="query", description="In Anthropic's form: maximum number of models, 1 to 1000, default 20"
    ),
    Parameter(name="after_id", place="query", description="In Anthropic's form: the model before the first"),
    Parameter(name="before_id", place="query", description="In Anthropic's form: the model after the last"),
)

_GOOGLES = Parameter(
    name="x-goog-api-client",
    place="header",
    description="If it or `x-goog-api-key` is there, the reply has Google's form",
)
_KEY = Parameter(name="key", place="query", description="An API key, for clients that do not send `x-goog-api-key`")
_GOOGLES_PAGE = (
    Parameter(name="pageSize", place="query", description="In Google's form: most models, default 50; 1000 at most"),
    Parameter(name="pageToken", place="query", description="In Google's form: `nextPageToken` of the page before"),
)
_MODEL = Parameter(name="model", place="path", description="Name of the model or adapter")

ROUTES = Routes(OPENAI, tag=Tag.OPENAI)
GEMINI_ROUTES = Routes(GEMINI, parameters=(_KEY,), tag=Tag.GEMINI)

# The dialects of clients that send one of these headers to a path of `ROUTES`.
DIALECTS = {VERSION_HEADER: ANTHROPIC, "x-goog-api-client": GEMINI, "x-goog-api-key": GEMINI}


@ROUTES.route(
    "GET",
    "/v1/models",
    SUMMARY,
    parameters=(_VERSION, *_PAGE, _GOOGLES, *_GOOGLES_PAGE),
    replies=((JSON, ModelList), (JSON, AnthropicModelList), (JSON, GeminiModelList)),
    errors=(400, 503),
)
async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    match _dialect_of(request):
        case dialect if dialect is ANTHROPIC:
            return json_reply(page_of(shown_models(listed(state), _contexts(state)), request.query))
        case dialect if dialect is GEMINI:
            return _gemini_models(request)
        case _:
            return json_reply(ModelList("list", listed(state)))


ROUTES.append(replace(ROUTES[-1], method="HEAD", replies=(), alias="head"))


@ROUTES.route(
    "GET",
    "/v1/models/{model}",
    "Return a model or an adapter",
    parameters=(_MODEL, _VERSION, _GOOGLES),
    slashes=True,
    replies=((JSON, Model), (JSON, AnthropicModel), (JSON, GeminiModel)),
    errors=(404, 503),
)
async def model(request: web.Request) -> web.Response:
    state, asked = request.app[STATE], request.match_info["model"]
    match _dialect_of(request):
        case dialect if dialect is ANTHROPIC:
            return json_reply(shown_model(found(state, asked), asked, _contexts(state)))
        case dialect if dialect is GEMINI:
            return _gemini_model(request)
        case _:
            return json_reply(found(state, asked))


@GEMINI_ROUTES.route(
    "GET",
    "/v1beta/models",
    "List the models and their adapters in Gemini's form, the default model first",
    parameters=(_KEY, *_GOOGLES_PAGE),
    reply=GeminiModelList,
    errors=(400, 503),
)
async def gemini_models(request: web.Request) -> web.Response:
    return _gemini_models(request)


@GEMINI_ROUTES.route(
    "GET",
    "/v1beta/models/{model}",
    "Return a model or an adapter in Gemini's form",
    parameters=(_MODEL, _KEY),
    slashes=True,
    reply=GeminiModel,
    errors=(404, 503),
)
async def gemini_model(request: web.Request) -> web.Response:
    return _gemini_model(request)


def _dialect_of(request: web.Request) -> Dialect:
    return next((dialect for header, dialect in DIALECTS.items() if header in request.headers), OPENAI)


def _gemini_models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    shown = [gemini.shown_model(model, model.id, _facts(state)) for model in listed(state)]
    return json_reply(gemini.page_of(shown, request.query))


def _gemini_model(request: web.Request) -> web.Response:
    state, asked = request.app[STATE], request.match_info["model"]
    return json_reply(gemini.shown_model(found(state, asked), asked, _facts(state)))


def _facts(state: AppState) -> dict[str, ModelFacts]:
    """Return the facts of each model and adapter that is loaded."""
    return {name: facts for facts in listed_models(state) for name in (facts.name, *facts.adapters)}


def _contexts(state: AppState) -> dict[str, int]:
    """Return the context of each model and adapter that is loaded, in tokens."""
    return {name: facts.max_sequence_tokens for name, facts in _facts(state).items()}
