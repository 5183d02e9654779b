"""Lists a generating request while it is in progress."""

from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from caravan_dialects.api.generation.in_progress import RequestInProgress, RequestsInProgress
from caravan_router.http.server.dialect import path_of
from caravan_router.http.server.middleware import REQUEST_ID
from caravan_router.http.server.state import ARRIVED, TRACE, owner_of

IN_PROGRESS = web.AppKey("in_progress", RequestsInProgress)


@contextmanager
def in_progress(request: web.Request) -> Iterator[RequestInProgress]:
    """List ``request`` until the end of the block."""
    entry = RequestInProgress(
        request_id=request[REQUEST_ID],
        owner=owner_of(request),
        route=path_of(request),
        arrived=request[ARRIVED],
        trace=request[TRACE],
    )
    with request.app[IN_PROGRESS].listing(entry):
        yield entry
