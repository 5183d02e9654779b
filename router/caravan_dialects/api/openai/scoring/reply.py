"""The pairs of texts that ``/v1/score`` and ``/v1/rerank`` score, and their replies."""

import time

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.openai.rules import missing_field_error, pairs_error, two_names_error
from caravan_dialects.api.openai.scoring.schema import (
    Document,
    RankedDocument,
    RankedList,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    ScoreUsage,
)
from caravan_dialects.api.openai.scoring.scores import Scores, Texts


def scored_sides(body: ScoreRequest) -> tuple[Texts, Texts]:
    """Return the texts of both sides of ``/v1/score``. Raises ValidationError."""
    first = _side(("text_1", body.text_1), ("queries", body.queries))
    second = _side(("text_2", body.text_2), ("documents", body.documents))
    counts = len(first.texts), len(second.texts)
    if 1 not in counts and counts[0] != counts[1]:
        raise pairs_error(second.field, *counts)
    return first, second


def _side(*given: tuple[str, str | list[str] | None]) -> Texts:
    """Return the texts of the one field that is set, under either of its names."""
    fields = [(field, value) for field, value in given if value is not None]
    if not fields:
        raise missing_field_error(given[0][0])
    if len(fields) > 1:
        raise two_names_error(given[0][0], given[1][0])
    field, value = fields[0]
    return Texts(field, [value] if isinstance(value, str) else value)


def score_list(made: Scores) -> ScoreList:
    """Return the reply of ``/v1/score``."""
    return ScoreList(
        id=f"score-{time.time_ns():x}",
        object="list",
        created=int(time.time()),
        model=made.model,
        data=[Score(index, "score", value) for index, value in enumerate(made.values)],
        usage=_usage(made),
    )


def ranked_sides(body: RerankRequest) -> tuple[Texts, Texts]:
    """Return the query and the documents of ``/v1/rerank``. Raises ValidationError."""
    check_range("top_n", body.top_n, 0, 2**31 - 1)
    documents = [one.text if isinstance(one, Document) else one for one in body.documents]
    return Texts("query", [body.query]), Texts("documents", documents)


def ranked_list(body: RerankRequest, documents: Texts, made: Scores) -> RankedList:
    """Return the reply of ``/v1/rerank``."""
    order = sorted(range(len(documents.texts)), key=lambda index: -made.values[index])
    shown = body.return_documents is not False
    return RankedList(
        id=f"rerank-{time.time_ns():x}",
        model=made.model,
        results=[
            RankedDocument(index, made.values[index], Document(documents.texts[index]) if shown else None)
            for index in order[: body.top_n or None]
        ],
        usage=_usage(made),
    )


def _usage(made: Scores) -> ScoreUsage:
    return ScoreUsage(made.tokens, made.tokens)
