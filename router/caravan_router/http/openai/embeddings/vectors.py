"""Computes vectors for the embedding routes of all dialects."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from caravan_router.http.generation.answer import Context, context_of
from caravan_router.http.generation.permits import holding_permits
from caravan_router.http.openai.rules import AdapterVectorsError, NoVectorsError
from caravan_router.http.server.state import CLIENT, STATE

Vector = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Vectors:
    """``vectors`` has one entry for each text, of length 1. ``tokens`` counts those of all texts together."""

    model: str
    vectors: list[Vector]
    tokens: int


async def vectors_of(
    request: web.Request,
    model: str | None,
    texts_of: Callable[[Context], Awaitable[Sequence[tuple[int, ...]]]],
) -> Vectors:
    """Embed the texts whose token ids ``texts_of`` returns. ``model`` is the field of the request body.

    The request holds one permit. The shard computes one text at a time, in turn with the steps of generations.
    Raises RequestError, EngineError.
    """
    with holding_permits(request.app[STATE], request[CLIENT], 1):
        context = await context_of(request)
        if context.model.embedding_size == 0:
            raise NoVectorsError
        if model is not None and model in context.model.adapters:
            raise AdapterVectorsError(model)
        texts = await texts_of(context)
        return Vectors(context.model.name, await context.engine.queries.embed(texts), sum(map(len, texts)))
