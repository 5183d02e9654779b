"""The routes that embed, score and rank texts, and what the embedding routes of all dialects share."""

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from caravan_dialects.api.generation.context import Context, model_name
from caravan_dialects.api.generation.permits import holding_permits
from caravan_dialects.api.openai.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    TextsOf,
    Vectors,
    reply_of,
    texts_of,
    vectors_in,
)
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
from caravan_router.http.generation.models import asked_model, check_client, context_of, metrics_of
from caravan_router.http.server.route import BODY_ERRORS, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import CLIENT, STATE, TRACE
from caravan_router.http.server.tags import Tag
from caravan_scheduler.core.trace import ServedRequest

_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)


async def vectors_of(
    request: web.Request, model: str | None, texts_of: TextsOf, *, for_scores: bool = False
) -> Vectors:
    """Embed as `vectors_in` does, with one permit. ``model`` is the field of the request body."""
    asked, state = asked_model(request, model), request.app[STATE]

    async def traced_texts_of(context: Context) -> Sequence[tuple[int, ...]]:
        texts = await texts_of(context)
        name = context.model.name
        request[TRACE].serves(ServedRequest(asked=asked, model=name, operation="embeddings", streamed=False))
        return texts

    client = request[CLIENT]
    check_client(request)
    with (
        holding_permits(client, state.permits.of(model_name(state.fleet, asked)), 1),
        metrics_of(state, asked).validating(1),
    ):
        return await vectors_in(await context_of(request, asked), traced_texts_of, for_scores=for_scores)


ROUTES = Routes(OPENAI, tag=Tag.OPENAI)


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
