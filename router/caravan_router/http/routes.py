"""The table of all routes, for the application and the OpenAPI document. Each package defines its own part."""

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.gemini.errors import GEMINI
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http import (
    anthropic,
    cloud,
    gemini,
    llama_server,
    llama_server_router,
    model_lists,
)
from caravan_router.http.admin import prefixes, shards, timeline
from caravan_router.http.ollama import embeddings as ollama_embeddings
from caravan_router.http.ollama import making as ollama_making
from caravan_router.http.ollama import models as ollama_models
from caravan_router.http.ollama import pulling as ollama_pulling
from caravan_router.http.ollama import routes as ollama
from caravan_router.http.openai import audio, chat, completions, decisions, embeddings, models, requests, scoring
from caravan_router.http.openai.conversations import branches
from caravan_router.http.openai.conversations import routes as conversations
from caravan_router.http.openai.responses import routes as responses
from caravan_router.http.ops import routes as ops
from caravan_router.http.page import routes as page
from caravan_router.http.server.dialect import Dialects
from caravan_router.http.server.route import Route
from caravan_router.http.tgi import chat_tokenize
from caravan_router.http.tgi import routes as tgi

ROUTES: tuple[Route, ...] = (
    *tgi.ROUTES,
    *chat_tokenize.ROUTES,
    *completions.ROUTES,
    *chat.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *branches.ROUTES,
    *audio.ROUTES,
    *embeddings.ROUTES,
    *decisions.ROUTES,
    *scoring.ROUTES,
    *model_lists.ROUTES,
    *models.ROUTES,
    *requests.ROUTES,
    *llama_server.ROUTES,
    *llama_server_router.ROUTES,
    *anthropic.ROUTES,
    *gemini.ROUTES,
    *model_lists.GEMINI_ROUTES,
    *ollama.ROUTES,
    *ollama_embeddings.ROUTES,
    *ollama_models.ROUTES,
    *ollama_pulling.ROUTES,
    *ollama_making.ROUTES,
    *cloud.ROUTES,
    *page.ROUTES,
    *ops.ROUTES,
    *shards.ROUTES,
    *prefixes.ROUTES,
    *timeline.ROUTES,
)

# A path without a route gets the 404 of the dialect whose prefix it has.
DIALECTS_OF_ROUTES = Dialects(
    by_header={
        (route.path, header): dialect
        for route in model_lists.ROUTES
        for header, dialect in model_lists.DIALECTS.items()
    },
    by_path={route.path: route.dialect for route in ROUTES},
    by_prefix={"/v1/": OPENAI, "/v1/messages": ANTHROPIC, "/v1beta/": GEMINI, "/api/": OLLAMA},
    default=TGI,
)
