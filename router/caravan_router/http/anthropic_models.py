"""``/v1/models``, which two dialects have: Anthropic's clients send ``anthropic-version`` and get Anthropic's form."""

from dataclasses import replace

from aiohttp import web

from caravan_dialects.api.anthropic.models import AnthropicModel, AnthropicModelList, page_of, shown_model, shown_models
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.schema import Model, ModelList
from caravan_router.http.generation.models import listed_models
from caravan_router.http.openai.models import SUMMARY, found, listed
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import JSON, Parameter
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE, AppState

VERSION_HEADER = "anthropic-version"
_VERSION = Parameter(name=VERSION_HEADER, place="header", description="If present, the reply has Anthropic's form")
_PAGE = (
    Parameter(
        name="limit", place="query", description="In Anthropic's form: maximum number of models, 1 to 1000, default 20"
    ),
    Parameter(name="after_id", place="query", description="In Anthropic's form: the model before the first"),
    Parameter(name="before_id", place="query", description="In Anthropic's form: the model after the last"),
)

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "GET",
    "/v1/models",
    SUMMARY,
    parameters=(_VERSION, *_PAGE),
    replies=((JSON, ModelList), (JSON, AnthropicModelList)),
    errors=(400, 503),
)
async def models(request: web.Request) -> web.Response:
    state = request.app[STATE]
    if VERSION_HEADER not in request.headers:
        return json_reply(ModelList("list", listed(state)))
    return json_reply(page_of(shown_models(listed(state), _contexts(state)), request.query))


ROUTES.append(replace(ROUTES[-1], method="HEAD", replies=(), alias="head"))


@ROUTES.route(
    "GET",
    "/v1/models/{model}",
    "Return a model or an adapter",
    parameters=(Parameter(name="model", place="path", description="Name of the model or adapter"), _VERSION),
    replies=((JSON, Model), (JSON, AnthropicModel)),
    errors=(404, 503),
)
async def model(request: web.Request) -> web.Response:
    state, asked = request.app[STATE], request.match_info["model"]
    entry = found(state, asked)
    if VERSION_HEADER not in request.headers:
        return json_reply(entry)
    return json_reply(shown_model(entry, asked, _contexts(state)))


def _contexts(state: AppState) -> dict[str, int]:
    """Return the context of each model and adapter that is loaded, in tokens."""
    return {name: facts.max_sequence_tokens for facts in listed_models(state) for name in (facts.name, *facts.adapters)}
