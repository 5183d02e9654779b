"""Counts generating requests, in the metrics and against the rate of their keys."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

from aiohttp import web

from caravan_dialects.api.errors import RequestError
from caravan_dialects.api.generation.permits import check_rate, counting_failures, counting_texts
from caravan_router.http.generation.models import asked_model, metrics_of
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import CLIENT, NAMED_MODEL, STATE
from caravan_router.metrics.recorder import ModelMetrics
from caravan_scheduler.core.errors import EngineError

# Set when a request is counted in the metrics and against the rate of its key, which happens once.
_COUNTED = web.RequestKey("counted", bool)


@contextmanager
def counting_request(request: web.Request, metrics: ModelMetrics, generations: int) -> Iterator[None]:
    """Count a request for ``generations``, and count them as failed if the block raises.

    Raises RateLimitedError, whatever the block would raise, if the key has no request left in this minute.
    """
    request[_COUNTED] = True
    metrics.request_arrived(generations)
    with counting_failures(metrics, generations):
        check_rate(request[CLIENT])
        yield


def counting_refusals(handler: Handler) -> Handler:
    """Count a request for one generation if ``handler`` refuses it before the number of generations is known."""

    @wraps(handler)
    async def counted(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except (RequestError, EngineError):
            if _COUNTED in request:
                raise
            asked = asked_model(request, request.get(NAMED_MODEL))
            with counting_request(request, metrics_of(request.app[STATE], asked), 1):
                raise

    return counted


def reading_texts(handler: Handler) -> Handler:
    """Count a request that only tokenizes as one of its key's that runs, and against the key's rate."""

    @wraps(handler)
    async def counted(request: web.Request) -> web.StreamResponse:
        with counting_texts(request[CLIENT]):
            return await handler(request)

    return counted
