"""``/v1/messages/batches`` in Anthropic's form, over the same batches."""

import asyncio
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from aiohttp import web

from caravan_dialects.api.anthropic.batches import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    MessageBatchRequest,
    MessageResult,
    input_lines,
    message_batch,
    result_line,
)
from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.errors import BatchEndedError, UnknownEntryError
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.generation.rules import unsupported_field_error
from caravan_dialects.api.paging import page_size
from caravan_dialects.bulk.file_table import Upload
from caravan_dialects.bulk.lines import MAX_LINES
from caravan_dialects.bulk.records import Batch, Counts, StoredFile
from caravan_dialects.bulk.store import Page
from caravan_dialects.conversations.nodes import new_id
from caravan_router.http.bulk.batches import batch_of
from caravan_router.http.bulk.line import MESSAGES
from caravan_router.http.bulk.running import BULK, CANCELLABLE, RUNNING_BATCHES
from caravan_router.http.server.body import Tolerance, forget_body
from caravan_router.http.server.repeated import REPEATABLE, keyed_id
from caravan_router.http.server.route import BODY_ERRORS, LINES, STORE_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import owner_of
from caravan_router.http.server.tags import Tag

_PATH = f"{MESSAGES}/batches"
_ONE = f"{_PATH}/{{batch_id}}"
_ID = Parameter(name="batch_id", place="path", description="Id of a message batch")
_WINDOW_H = 24
_DEFAULT_PAGE, _MOST_PAGE = 20, 1_000
_LINES_AT_ONCE = 100

ROUTES = Routes(ANTHROPIC, tolerance=Tolerance.ALWAYS, tag=Tag.ANTHROPIC)


@ROUTES.route(
    "POST",
    _PATH,
    "Answer many message requests at the lowest priority, when there is room",
    parameters=(REPEATABLE,),
    reply=MessageBatch,
    errors=(*BODY_ERRORS, *STORE_ERRORS, 409),
)
async def create_message_batch(request: web.Request, body: MessageBatchRequest) -> web.Response:
    batch_id, store, owner, now = keyed_id(request, "msgbatch"), request.app[BULK], owner_of(request), time.time()
    if batch_id is not None and (known := await store.batch(owner, batch_id)) is not None:
        return json_reply(_shown(request, *known))
    check_range("requests: entries", len(body.requests), 1, MAX_LINES)
    async with store.uploading() as upload:
        await store.call(lambda _: _write_lines(body, upload))
        forget_body(request)
        file = StoredFile(
            id=new_id("file"),
            owner=owner,
            purpose="batch",
            name="requests.jsonl",
            size=upload.size,
            created=now,
            expires=now + store.settings.life_s,
        )
        batch = Batch(
            id=batch_id or new_id("msgbatch"),
            owner=owner,
            endpoint=MESSAGES,
            input_file=file.id,
            window=f"{_WINDOW_H}h",
            created=now,
            deadline=now + _WINDOW_H * 3600,
            total=len(body.requests),
            anthropic=True,
        )
        begun, counts = await request.app[RUNNING_BATCHES].add_with_file(batch, upload, file)
    return json_reply(_shown(request, begun, counts))


def _write_lines(body: MessageBatchRequest, upload: Upload) -> None:
    for line in input_lines(body, MESSAGES):
        upload.write(line)


def _shown(request: web.Request, batch: Batch, counts: Counts) -> MessageBatch:
    return message_batch(batch, counts, f"{request.scheme}://{request.host}{_PATH}/{batch.id}/results")


@ROUTES.route(
    "GET", _ONE, "Describe a message batch and its progress", parameters=(_ID,), reply=MessageBatch, errors=STORE_ERRORS
)
async def get_message_batch(request: web.Request) -> web.Response:
    return json_reply(_shown(request, *await batch_of(request, anthropic=True)))


@ROUTES.route(
    "POST",
    f"{_ONE}/cancel",
    "Cancel a message batch and keep the results that it has",
    parameters=(_ID,),
    reply=MessageBatch,
    errors=STORE_ERRORS,
)
async def cancel_message_batch(request: web.Request) -> web.Response:
    batch, counts = await batch_of(request, anthropic=True)
    if batch.status in CANCELLABLE:
        batch = await request.app[RUNNING_BATCHES].cancel(batch)
    return json_reply(_shown(request, batch, counts))


@ROUTES.route(
    "DELETE",
    _ONE,
    "Delete a message batch that has ended",
    parameters=(_ID,),
    reply=DeletedMessageBatch,
    errors=(400, *STORE_ERRORS),
)
async def delete_message_batch(request: web.Request) -> web.Response:
    batch, _ = await batch_of(request, anthropic=True)
    if not await request.app[BULK].delete_batch(batch.owner, batch.id):
        raise BatchEndedError("deleted", batch.status)
    return json_reply(DeletedMessageBatch(batch.id))


@ROUTES.route(
    "GET",
    f"{_ONE}/results",
    "Return one line for each request of a message batch that has ended",
    parameters=(_ID,),
    replies=((LINES, MessageResult),),
    errors=(400, *STORE_ERRORS),
)
async def get_results(request: web.Request) -> web.StreamResponse:
    batch, _ = await batch_of(request, anthropic=True)
    if not batch.status.has_ended:
        raise BatchEndedError("read", batch.status)
    store = request.app[BULK]
    response = web.StreamResponse(headers={"Content-Type": LINES})
    paths = []
    for file_id in filter(None, (batch.output_file, batch.error_file)):
        if (file := await store.file(batch.owner, file_id)) is None:
            raise UnknownEntryError("file", file_id)
        paths.append(await store.path_of(file))
    await response.prepare(request)
    for path in paths:
        start = 0
        while True:
            lines, start = await asyncio.to_thread(_results, path, start)
            if not lines:
                break
            await response.write(lines)
    await response.write_eof()
    return response


def _results(path: Path, start: int) -> tuple[bytes, int]:
    """Return some lines in Anthropic's form, and where the next one starts in the file."""
    with path.open("rb") as file:
        file.seek(start)
        lines = b"".join(result_line(line) for line in islice(iter(file.readline, b""), _LINES_AT_ONCE))
        return lines, file.tell()


_PAGE = (
    Parameter(name="after_id", place="query", description="Id of the batch before the first one of the page"),
    Parameter(
        name="limit",
        place="query",
        description=f"Maximum number of batches: 1 to {_MOST_PAGE}, default {_DEFAULT_PAGE}",
    ),
)


@ROUTES.route(
    "GET", _PATH, "List the message batches, newest first", parameters=_PAGE, reply=MessageBatchList, errors=(400, 503)
)
async def list_message_batches(request: web.Request) -> web.Response:
    page = _page_of(request.query)
    found = await request.app[BULK].batches(owner_of(request), page, anthropic=True)
    shown = [_shown(request, *one) for one in found[: page.limit]]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_reply(MessageBatchList(data=shown, has_more=len(found) > page.limit, first_id=first, last_id=last))


def _page_of(query: Mapping[str, str]) -> Page:
    """Raises ValidationError."""
    limit = page_size(query, _DEFAULT_PAGE, _MOST_PAGE)
    if "before_id" in query:
        raise unsupported_field_error("before_id", "use `after_id`", query["before_id"])
    return Page(limit=limit, after=query.get("after_id"))
