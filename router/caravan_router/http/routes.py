"""The table of all routes, for the application and the OpenAPI document. Each package defines its own part."""

from caravan_router.http.admin import routes as admin
from caravan_router.http.anthropic import routes as anthropic
from caravan_router.http.anthropic.errors import ANTHROPIC
from caravan_router.http.cloud import routes as cloud
from caravan_router.http.llama_server import routes as llama_server
from caravan_router.http.ollama import routes as ollama
from caravan_router.http.ollama.errors import OLLAMA
from caravan_router.http.openai import models, requests
from caravan_router.http.openai.chat import routes as chat
from caravan_router.http.openai.completions import routes as completions
from caravan_router.http.openai.conversations import routes as conversations
from caravan_router.http.openai.embeddings import routes as embeddings
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.responses import routes as responses
from caravan_router.http.openai.scoring import routes as scoring
from caravan_router.http.ops import routes as ops
from caravan_router.http.server.dialect import Dialects
from caravan_router.http.server.route import Route
from caravan_router.http.tgi import chat_tokenize
from caravan_router.http.tgi import routes as tgi
from caravan_router.http.tgi.errors import TGI

ROUTES: tuple[Route, ...] = (
    *tgi.ROUTES,
    *chat_tokenize.ROUTES,
    *completions.ROUTES,
    *chat.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *embeddings.ROUTES,
    *scoring.ROUTES,
    *models.ROUTES,
    *requests.ROUTES,
    *llama_server.ROUTES,
    *anthropic.ROUTES,
    *ollama.ROUTES,
    *cloud.ROUTES,
    *ops.ROUTES,
    *admin.ROUTES,
)

# A path without a route gets the 404 of the dialect whose prefix it has.
DIALECTS_OF_ROUTES = Dialects(
    by_path={route.path: route.dialect for route in ROUTES},
    by_prefix={"/v1/": OPENAI, "/v1/messages": ANTHROPIC, "/api/": OLLAMA},
    default=TGI,
)
