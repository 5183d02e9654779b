"""Serves the embedding routes of all dialects."""

from collections.abc import Sequence

from aiohttp import web

from caravan_dialects.api.generation.context import Context, model_name
from caravan_dialects.api.generation.permits import check_rate, holding_permits
from caravan_dialects.api.openai.embeddings import TextsOf, Vectors, vectors_in
from caravan_router.http.generation.context import context_of
from caravan_router.http.generation.models import asked_model, metrics_of
from caravan_router.http.server.state import CLIENT, STATE, TRACE
from caravan_scheduler.core.trace import ServedRequest


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
    check_rate(client)
    with (
        holding_permits(client, state.permits.of(model_name(state.fleet, asked)), 1),
        metrics_of(state, asked).validating(1),
    ):
        return await vectors_in(await context_of(request, asked), traced_texts_of, for_scores=for_scores)
