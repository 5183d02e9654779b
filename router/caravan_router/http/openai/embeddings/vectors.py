"""Computes vectors for the embedding routes of all dialects."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from caravan_router.core.engine import ModelFacts
from caravan_router.core.trace import ServedRequest
from caravan_router.http.generation.context import Context, context_of
from caravan_router.http.generation.models import asked_model, metrics_of, model_name
from caravan_router.http.generation.permits import holding_permits
from caravan_router.http.openai.rules import AdapterVectorsError, NoScoresError, NoVectorsError, RankingModelError
from caravan_router.http.server.state import STATE, TRACE

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


async def vectors_of(
    request: web.Request, model: str | None, texts_of: TextsOf, *, for_scores: bool = False
) -> Vectors:
    """Embed the texts whose token ids ``texts_of`` returns. ``model`` is the field of the request body.

    ``for_scores``: the model may also be one that ranks; then ``texts_of`` returns pairs.

    The request holds one permit. The shard computes one text at a time, in turn with the steps of generations.
    Raises RequestError, EngineError.
    """
    asked, state = asked_model(request, model), request.app[STATE]

    async def traced_texts_of(context: Context) -> Sequence[tuple[int, ...]]:
        texts = await texts_of(context)
        name = context.model.name
        request[TRACE].serves(ServedRequest(asked=asked, model=name, operation="embeddings", streamed=False))
        return texts

    with holding_permits(request, model_name(state.fleet, asked), 1), metrics_of(state, asked).validating(1):
        return await vectors_in(await context_of(request, asked), traced_texts_of, for_scores=for_scores)


async def vectors_in(context: Context, texts_of: TextsOf, *, for_scores: bool = False) -> Vectors:
    """Embed as `vectors_of` does, in a context that is known. Raises RequestError, EngineError."""
    _check_model(context.model, for_scores=for_scores)
    if context.adapter:
        raise AdapterVectorsError(context.adapter)
    texts = await texts_of(context)
    vectors = await context.engine.queries.embed(texts)
    return Vectors(context.model.name, vectors, sum(map(len, texts)), context.model.ranks)


def _check_model(model: ModelFacts, *, for_scores: bool) -> None:
    if model.embedding_size or (model.ranks and for_scores):
        return
    if for_scores:
        raise NoScoresError
    raise RankingModelError if model.ranks else NoVectorsError
