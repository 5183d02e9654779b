"""Scores of pairs of texts, and documents ranked by them, with the fields of vLLM and of Jina."""

import asyncio
import operator
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_texts, check_token_ids, nth
from caravan_dialects.api.generation.rules import empty_prompt_error, too_many_prompts_error
from caravan_dialects.api.generation.schema import ModelName, NoEffect
from caravan_dialects.api.openai.embeddings import TextsOf, Vectors
from caravan_dialects.api.openai.rules import missing_field_error, pairs_error, two_names_error

# The event loop serves others after this number of products of vectors, which take about 10 ms.
_PAIRS_PER_TURN = 64
# Embeds the texts, or for a model that ranks the pairs, whose token ids the function returns.
Embed = Callable[[TextsOf], Awaitable[Vectors]]


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either side has one text, or both have as many. ``queries`` and ``documents`` are newer names of the fields."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: ModelName = None
    user: NoEffect = None


class Score(msgspec.Struct, frozen=True):
    """The cosine of the angle between the two vectors: 1 for texts with equal vectors. From a model that ranks: how
    relevant the second text is to the first, from 0 to 1.
    """

    index: int
    object: str
    score: float


class ScoreUsage(msgspec.Struct, frozen=True):
    """Counts what is computed: each different text once, or from a model that ranks each pair."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class ScoreList(msgspec.Struct, frozen=True):
    """One entry per pair, in order."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: ScoreUsage


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``top_n``: how many of the best documents to return; 0 or null returns all."""

    query: str
    documents: list[str | Document]
    model: ModelName = None
    top_n: int | None = None
    return_documents: bool | None = None
    user: NoEffect = None


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """``index``: the place in the request. ``document``: absent if ``return_documents`` is false."""

    index: int
    relevance_score: float
    document: Document | None = None


class RankedList(msgspec.Struct, frozen=True):
    """The documents, the most relevant one first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: ScoreUsage


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of one side of the pairs, and the field that they came in."""

    field: str
    texts: Sequence[str]

    @property
    def places(self) -> list[str]:
        """What to call each text."""
        return [nth(self.field, index, len(self.texts)) for index in range(len(self.texts))]


@dataclass(frozen=True, slots=True)
class Scores:
    """``values`` has one score per pair. ``tokens`` counts what was computed: each different text, or each pair."""

    model: str
    values: list[float]
    tokens: int


async def scores_of(embed: Embed, first: Texts, second: Texts) -> Scores:
    """Score the n-th text of ``first`` with the n-th of ``second``; a side of one text is paired with all of the other.

    Raises RequestError, EngineError.
    """
    count = max(len(first.texts), len(second.texts))
    pairs = [_pair(first, second, index) for index in range(count)] if first.texts and second.texts else []
    sides = {text: place for side in (second, first) for text, place in zip(side.texts, side.places, strict=True)}

    async def texts_of(context: Context) -> list[tuple[int, ...]]:
        for side in (first, second):
            if not side.texts:
                raise empty_prompt_error(side.field)
            if len(side.texts) > context.limits.max_embed_texts:
                raise too_many_prompts_error(side.field, context.limits.max_embed_texts, len(side.texts))
            check_texts(side.field, side.texts, context.bounds)
        if context.model.ranks:
            tokens = await context.engine.queries.tokenize_pairs(pairs)
            longer = second if len(second.texts) > 1 else first if len(first.texts) > 1 else second
            places = longer.places
        else:
            tokens = await context.engine.queries.tokenize_texts([*sides])
            places = [*sides.values()]
        for place, token_ids in zip(places, tokens, strict=True):
            check_token_ids(place, token_ids, context.model.max_embed_tokens, context.model)
        return tokens

    made = await embed(texts_of)
    if made.ranks:
        return Scores(made.model, [relevance for (relevance,) in made.vectors], made.tokens)
    vectors = dict(zip(sides, made.vectors, strict=True))
    values = []
    for index, (one, other) in enumerate(pairs):
        if index % _PAIRS_PER_TURN == 0:
            await asyncio.sleep(0)
        values.append(sum(map(operator.mul, vectors[one], vectors[other])))
    return Scores(made.model, values, made.tokens)


def _pair(first: Texts, second: Texts, index: int) -> tuple[str, str]:
    one, other = (side.texts[index if len(side.texts) > 1 else 0] for side in (first, second))
    return one, other


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
