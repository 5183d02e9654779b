"""``/v1/score`` and ``/v1/rerank``."""

from aiohttp import web

from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.scoring import (
    RankedList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
    Scores,
    Texts,
    ranked_list,
    ranked_sides,
    score_list,
    scored_sides,
    scores_of,
)
from caravan_router.http.openai.vectors import vectors_of
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS
from caravan_router.http.server.routes import Routes

_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)

ROUTES = Routes(OPENAI)


@ROUTES.route("POST", "/v1/score", "Return a similarity score for each pair of texts", reply=ScoreList, errors=_ERRORS)
async def score(request: web.Request, body: ScoreRequest) -> web.Response:
    return json_reply(score_list(await _scores(request, body.model, *scored_sides(body))))


@ROUTES.route("POST", "/v1/rerank", "Rank documents by relevance to a query", reply=RankedList, errors=_ERRORS)
async def rerank(request: web.Request, body: RerankRequest) -> web.Response:
    query, documents = ranked_sides(body)
    return json_reply(ranked_list(body, documents, await _scores(request, body.model, query, documents)))


ROUTES.also("/rerank", "unversioned")
ROUTES.also("/v1/reranking", "gerund")
ROUTES.also("/reranking", "unversioned_gerund")


async def _scores(request: web.Request, model: str | None, first: Texts, second: Texts) -> Scores:
    return await scores_of(lambda texts_of: vectors_of(request, model, texts_of, for_scores=True), first, second)
