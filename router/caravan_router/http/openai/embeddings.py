"""``/v1/embeddings``."""

from functools import partial

from aiohttp import web

from caravan_dialects.api.openai.embeddings import EmbeddingList, EmbeddingRequest, reply_of, texts_of
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.openai.vectors import vectors_of
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "POST",
    "/v1/embeddings",
    "Return one embedding for each text",
    reply=EmbeddingList,
    errors=(*BODY_ERRORS, 404, 424, 429, 503),
)
async def embeddings(request: web.Request, body: EmbeddingRequest) -> web.Response:
    return json_reply(reply_of(body, await vectors_of(request, body.model, partial(texts_of, body))))


ROUTES.also("/embeddings", "unversioned")
