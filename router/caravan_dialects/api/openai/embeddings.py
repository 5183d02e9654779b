"""Vectors of texts: ``/v1/embeddings``, and what the embedding routes of other dialects share with it."""

import base64
import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import check_token_ids, nth, tokenize_texts
from caravan_dialects.api.generation.schema import ModelName, NoEffect
from caravan_dialects.api.generation.serving import text_sender_of
from caravan_dialects.api.openai.prompts import TextPrompt, TokensPrompt, split_prompts
from caravan_dialects.api.openai.rules import (
    adapter_vectors_error,
    dimensions_error,
    no_scores_error,
    no_vectors_error,
    ranking_model_error,
)
from caravan_dialects.api.openai.schema import Prompt
from caravan_scheduler.core.engine import ModelFacts

Vector = tuple[float, ...]
# Returns the token ids of the texts to embed. Raises RequestError, EngineError.
TextsOf = Callable[[Context], Awaitable[Sequence[tuple[int, ...]]]]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter has no vectors. ``dimensions``: if set, the size of the model's vectors."""

    input: Prompt
    model: ModelName = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: NoEffect = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector of length 1. With ``encoding_format`` base64: its float32 numbers in little-endian bytes."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True):
    """One entry per text, in order."""

    object: str
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


@dataclass(frozen=True, slots=True)
class Vectors:
    """``vectors`` has one entry for each text, of length 1. ``tokens`` counts those of all texts together.

    ``ranks``: the texts are pairs, and each entry is one number, the relevance of the pair's document.
    """

    model: str
    vectors: list[Vector]
    tokens: int
    ranks: bool = False


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


async def texts_of(body: EmbeddingRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of each text. Raises ValidationError, EngineError."""
    size = context.model.embedding_size
    if body.dimensions is not None and body.dimensions != size:
        raise dimensions_error(size, body.dimensions)
    prompts = split_prompts("input", body.input, context.limits.max_embed_texts)
    texts = [prompt.text for prompt in prompts if isinstance(prompt, TextPrompt)]
    given = [prompt.token_ids for prompt in prompts if isinstance(prompt, TokensPrompt)]
    # A request has one or the other.
    tokens = given or await tokenize_texts(context.engine, "input", texts, context.bounds)
    for number, token_ids in enumerate(tokens):
        check_token_ids(nth("input", number, len(tokens)), token_ids, context.model.max_embed_tokens, context.model)
    return tokens


def reply_of(body: EmbeddingRequest, made: Vectors) -> EmbeddingList:
    """Return the reply."""
    encode = _base64 if body.encoding_format == "base64" else list
    return EmbeddingList(
        object="list",
        data=[Embedding("embedding", index, encode(vector)) for index, vector in enumerate(made.vectors)],
        model=made.model,
        usage=EmbeddingUsage(made.tokens, made.tokens),
    )


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
