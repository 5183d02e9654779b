"""The table of all routes, for the application and the OpenAPI document. Each package defines its own part."""

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.gemini.errors import GEMINI
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http import (
    adapters,
    admin,
    anthropic,
    cloud,
    gemini,
    llama_server,
    metrics,
    model_lists,
    ops,
    page,
    tgi,
)
from caravan_router.http.bulk import batches, files, message_batches
from caravan_router.http.docs import routes as docs
from caravan_router.http.ollama import models as ollama_models
from caravan_router.http.ollama import routes as ollama
from caravan_router.http.ollama import stock as ollama_stock
from caravan_router.http.openai import generation, models, organization, requests, responses, vectors
from caravan_router.http.openai.conversations import branches
from caravan_router.http.openai.conversations import routes as conversations
from caravan_router.http.server.dialect import Dialects
from caravan_router.http.server.route import Route

ROUTES: tuple[Route, ...] = (
    *tgi.ROUTES,
    *generation.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *branches.ROUTES,
    *files.ROUTES,
    *batches.ROUTES,
    *vectors.ROUTES,
    *model_lists.ROUTES,
    *models.ROUTES,
    *requests.ROUTES,
    *organization.ROUTES,
    *llama_server.ROUTES,
    *llama_server.CATALOGUE_ROUTES,
    *anthropic.ROUTES,
    *message_batches.ROUTES,
    *gemini.ROUTES,
    *model_lists.GEMINI_ROUTES,
    *ollama.ROUTES,
    *ollama_models.ROUTES,
    *ollama_stock.ROUTES,
    *cloud.ROUTES,
    *page.ROUTES,
    *ops.ROUTES,
    *docs.ROUTES,
    *metrics.ROUTES,
    *admin.ROUTES,
    *adapters.ROUTES,
)

# Answered with the reason why they are not supported, and not described.
UNSUPPORTED: tuple[Route, ...] = (*responses.UNSUPPORTED,)

# A path without a route gets the 404 of the dialect whose prefix it has.
DIALECTS_OF_ROUTES = Dialects(
    by_header={
        (route.path, header): dialect
        for route in model_lists.ROUTES
        for header, dialect in model_lists.DIALECTS.items()
    },
    by_path={route.path: route.dialect for route in (*ROUTES, *UNSUPPORTED)},
    by_prefix={
        "/v1/": OPENAI,
        "/inference/v1/": OPENAI,
        "/v1/messages": ANTHROPIC,
        "/v1beta/": GEMINI,
        "/api/": OLLAMA,
    },
    default=TGI,
)
