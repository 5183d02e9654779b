"""Computes vectors for the embedding routes of all dialects."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.serving import text_sender_of
from caravan_dialects.api.openai.rules import (
    adapter_vectors_error,
    no_scores_error,
    no_vectors_error,
    ranking_model_error,
)
from caravan_scheduler.core.engine import ModelFacts

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """``vectors`` has one entry for each text, of length 1. ``tokens`` counts those of all texts together.

    ``ranks``: the texts are pairs, and each entry is one number, the relevance of the pair's document.
    """

    model: str
    vectors: list[Vector]
    tokens: int
    ranks: bool = False


# Returns the token ids of the texts to embed. Raises RequestError, EngineError.
TextsOf = Callable[[Context], Awaitable[Sequence[tuple[int, ...]]]]


async def vectors_in(context: Context, texts_of: TextsOf, *, for_scores: bool = False) -> Vectors:
    """Embed the texts whose token ids ``texts_of`` returns.

    ``for_scores``: the model may also be one that ranks; then ``texts_of`` returns pairs.

    Shards compute the texts of several requests together, in turn with the steps of generations. Raises RequestError,
    EngineError.
    """
    _check_model(context.model, for_scores=for_scores)
    if context.adapter:
        raise adapter_vectors_error(context.adapter)
    sender = text_sender_of(context.sender)
    texts = await texts_of(context)
    vectors = await context.engine.queries.embed(texts, sender)
    return Vectors(context.model.name, vectors, sum(map(len, texts)), context.model.ranks)


def _check_model(model: ModelFacts, *, for_scores: bool) -> None:
    if model.embedding_size or (model.ranks and for_scores):
        return
    if for_scores:
        raise no_scores_error()
    raise ranking_model_error() if model.ranks else no_vectors_error()


def shortened(vector: Vector, dimensions: int | None) -> list[float]:
    """Return the first ``dimensions`` numbers, scaled to length 1; all of them for None."""
    if dimensions is None or dimensions == len(vector):
        return list(vector)
    kept = vector[:dimensions]
    length = math.hypot(*kept) or 1.0
    return [number / length for number in kept]
