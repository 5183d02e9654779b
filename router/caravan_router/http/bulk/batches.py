"""``/v1/batches`` in OpenAI's form."""

import time

from aiohttp import web

from caravan_dialects.api.errors import BatchEndedError, UnknownEntryError
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.openai.bulk.rules import (
    check_life,
    check_metadata,
    endpoint_error,
    page_of_query,
    window_hours,
)
from caravan_dialects.api.openai.bulk.schema import BatchList, BatchObject, BatchRequest, batch_object
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.bulk.lines import MAX_BYTES
from caravan_dialects.bulk.records import Batch, BatchStatus, Counts
from caravan_dialects.conversations.nodes import new_id
from caravan_router.http.bulk.files import file_of
from caravan_router.http.bulk.line import ENDPOINTS
from caravan_router.http.bulk.running import BULK, CANCELLABLE, RUNNING_BATCHES
from caravan_router.http.server.repeated import REPEATABLE, keyed_id
from caravan_router.http.server.route import BODY_ERRORS, STORE_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import owner_of
from caravan_router.http.server.tags import Tag

_PATH = "/v1/batches"
_ONE = f"{_PATH}/{{batch_id}}"
_ID = Parameter(name="batch_id", place="path", description="Id of a batch")
_DEFAULT_PAGE, _MOST_PAGE = 20, 100
_HOUR_S = 3600.0
_ENDPOINTS = tuple(path for path, endpoint in ENDPOINTS.items() if endpoint.dialect is OPENAI)

ROUTES = Routes(OPENAI, tag=Tag.FILES)


@ROUTES.route(
    "POST",
    _PATH,
    "Answer the requests of a file at the lowest priority, when there is room",
    parameters=(REPEATABLE,),
    reply=BatchObject,
    errors=(*BODY_ERRORS, *STORE_ERRORS, 409),
)
async def create_batch(request: web.Request, body: BatchRequest) -> web.Response:
    batch_id, owner = keyed_id(request, "batch"), owner_of(request)
    # Its file may not be there any more.
    if batch_id is not None and (known := await request.app[BULK].batch(owner, batch_id)) is not None:
        return json_reply(batch_object(*known))
    if body.endpoint not in _ENDPOINTS:
        raise endpoint_error(_ENDPOINTS, body.endpoint)
    hours = window_hours(body.completion_window)
    check_metadata(body.metadata)
    expiry = body.output_expires_after
    if expiry is not None:
        check_life("output_expires_after", expiry.anchor, expiry.seconds)
    file = await file_of(request, body.input_file_id)
    check_range("bytes of the input file", file.size, 0, MAX_BYTES)
    now = time.time()
    batch = Batch(
        id=batch_id or new_id("batch"),
        owner=owner,
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        created=now,
        deadline=now + hours * _HOUR_S,
        metadata=body.metadata,
        output_life_s=None if expiry is None else float(expiry.seconds),
    )
    return json_reply(batch_object(*await request.app[RUNNING_BATCHES].add(batch)))


async def batch_of(request: web.Request, *, anthropic: bool = False) -> tuple[Batch, Counts]:
    """Return the batch that the path names. Raises UnknownEntryError."""
    batch_id = request.match_info["batch_id"]
    found = await request.app[BULK].batch(owner_of(request), batch_id)
    if found is None or found[0].anthropic is not anthropic:
        raise UnknownEntryError("batch", batch_id)
    return found


@ROUTES.route(
    "GET", _ONE, "Describe a batch and its progress", parameters=(_ID,), reply=BatchObject, errors=STORE_ERRORS
)
async def get_batch(request: web.Request) -> web.Response:
    return json_reply(batch_object(*await batch_of(request)))


@ROUTES.route(
    "POST",
    f"{_ONE}/cancel",
    "Cancel a batch and keep the answers that it has",
    parameters=(_ID,),
    reply=BatchObject,
    errors=(400, *STORE_ERRORS),
)
async def cancel_batch(request: web.Request) -> web.Response:
    batch, counts = await batch_of(request)
    if batch.status in CANCELLABLE:
        batch = await request.app[RUNNING_BATCHES].cancel(batch)
    elif batch.status.has_ended and batch.status is not BatchStatus.CANCELLED:
        raise BatchEndedError("cancelled", batch.status)
    return json_reply(batch_object(batch, counts))


_PAGE = (
    Parameter(name="after", place="query", description="Id of the batch before the first one of the page"),
    Parameter(
        name="limit",
        place="query",
        description=f"Maximum number of batches: 1 to {_MOST_PAGE}, default {_DEFAULT_PAGE}",
    ),
)


@ROUTES.route("GET", _PATH, "List the batches, newest first", parameters=_PAGE, reply=BatchList, errors=(400, 503))
async def list_batches(request: web.Request) -> web.Response:
    page = page_of_query(request.query, _DEFAULT_PAGE, _MOST_PAGE)
    found = await request.app[BULK].batches(owner_of(request), page, anthropic=False)
    shown = [batch_object(*one) for one in found[: page.limit]]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_reply(BatchList(data=shown, has_more=len(found) > page.limit, first_id=first, last_id=last))
