"""``/v1/score`` and ``/v1/rerank``."""

import time

import msgspec
from aiohttp import web

from caravan_router.http.generation.checks import check_range
from caravan_router.http.openai.embeddings.vectors import vectors_of
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.rules import MissingFieldError, PairsError, TwoNamesError
from caravan_router.http.openai.scoring.schema import (
    Document,
    RankedDocument,
    RankedList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    ScoreUsage,
)
from caravan_router.http.openai.scoring.scores import Scores, Texts, scores_of
from caravan_router.http.server.body import read_body
from caravan_router.http.server.json_reply import json_reply
from caravan_router.http.server.route import BODY_ERRORS, JSON, Route

_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)


async def score(request: web.Request) -> web.Response:
    """Handle ``/v1/score``."""
    body = await read_body(request, _SCORE)
    first = _side(("text_1", body.text_1), ("queries", body.queries))
    second = _side(("text_2", body.text_2), ("documents", body.documents))
    counts = len(first.texts), len(second.texts)
    if 1 not in counts and counts[0] != counts[1]:
        raise PairsError(second.field, *counts)
    made = await _scores(request, body.model, first, second)
    reply = ScoreList(
        id=f"score-{time.time_ns():x}",
        object="list",
        created=int(time.time()),
        model=made.model,
        data=[Score(index, "score", value) for index, value in enumerate(made.values)],
        usage=_usage(made),
    )
    return json_reply(reply)


def _side(*given: tuple[str, str | list[str] | None]) -> Texts:
    """Return the texts of the one field that is set, under either of its names."""
    fields = [(field, value) for field, value in given if value is not None]
    if not fields:
        raise MissingFieldError(given[0][0])
    if len(fields) > 1:
        raise TwoNamesError(given[0][0], given[1][0])
    field, value = fields[0]
    return Texts(field, [value] if isinstance(value, str) else value)


async def rerank(request: web.Request) -> web.Response:
    """Handle ``/v1/rerank``."""
    body = await read_body(request, _RERANK)
    documents = [one.text if isinstance(one, Document) else one for one in body.documents]
    check_range("top_n", body.top_n, 0, 2**31 - 1)
    made = await _scores(request, body.model, Texts("query", [body.query]), Texts("documents", documents))
    order = sorted(range(len(documents)), key=lambda index: -made.values[index])
    shown = body.return_documents is not False
    reply = RankedList(
        id=f"rerank-{time.time_ns():x}",
        model=made.model,
        results=[
            RankedDocument(index, made.values[index], Document(documents[index]) if shown else None)
            for index in order[: body.top_n or None]
        ],
        usage=_usage(made),
    )
    return json_reply(reply)


async def _scores(request: web.Request, model: str | None, first: Texts, second: Texts) -> Scores:
    return await scores_of(lambda texts_of: vectors_of(request, model, texts_of, for_scores=True), first, second)


def _usage(made: Scores) -> ScoreUsage:
    return ScoreUsage(made.tokens, made.tokens)


_ERRORS = (*BODY_ERRORS, 404, 424, 429, 503)

ROUTES = (
    Route(
        method="POST",
        path="/v1/score",
        handler=score,
        dialect=OPENAI,
        summary="Return how similar the texts of each pair are",
        body=(ScoreRequest,),
        replies=((JSON, ScoreList),),
        errors=_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/rerank",
        handler=rerank,
        dialect=OPENAI,
        summary="Order documents by how similar they are to a query",
        body=(RerankRequest,),
        replies=((JSON, RankedList),),
        errors=_ERRORS,
    ),
)
