"""Works through batches: checks their files, answers their lines, and writes the output files."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from caravan_dialects.api.error_table import kind_of
from caravan_dialects.api.errors import (
    BudgetError,
    FileRoomError,
    InvalidKeyError,
    RepeatedRequestError,
    RequestError,
    UnknownModelError,
)
from caravan_dialects.bulk.file_table import Upload
from caravan_dialects.bulk.lines import CheckedLines, checked_lines, read_line
from caravan_dialects.bulk.records import Answered, AnswerKind, Batch, BatchStatus, Counts, Line, LineError, StoredFile
from caravan_dialects.bulk.store import BulkStore, Tables
from caravan_dialects.conversations.nodes import new_id
from caravan_dialects.conversations.store import StoreError
from caravan_router.http.bulk.line import ENDPOINTS, LineRequest, answer_line
from caravan_router.http.server.authentication import client_named
from caravan_router.http.server.sole_worker import SoleWorker, Work, end_tasks
from caravan_router.http.server.state import ENDING, STATE
from caravan_scheduler.core.errors import EngineError

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Statuses of errors that pass: no shard is up, the queue was too long.
_PASSING = frozenset({429, 503})
# Between attempts of a line, or of the store.
_RETRY_S, _MOST_RETRY_S = 0.5, 10.0
# After its start, a server gets to know the models of its shards.
_JOIN_S = 60.0
CANCELLABLE = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})


class _LineResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineFailure(msgspec.Struct, frozen=True):
    code: str
    message: str


class AnsweredLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output file or of an error file, in OpenAI's form."""

    id: str
    custom_id: str
    response: _LineResponse | None = None
    error: _LineFailure | None = None


_DROPPED = {
    BatchStatus.CANCELLED: _LineFailure("batch_cancelled", "The batch was cancelled before this request was answered"),
    BatchStatus.EXPIRED: _LineFailure(
        "batch_expired", "This request could not be executed before the completion window expired"
    ),
}


@dataclass(slots=True, eq=False)
class _RunningBatch:
    """A batch under way."""

    batch: Batch
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def cancel(self, batch: Batch) -> None:
        """Let it end with what is answered. ``batch``: as it is now, `CANCELLING`."""
        self.batch = batch
        self.cancelled.set()


class RunningBatches:
    """The owner of all batches of this server that have not ended.

    With a folder, one server at a time works on what is in it; with a database, each on what began there, or what
    another one has left. See `SoleWorker`.
    """

    def __init__(self, app: web.Application, store: BulkStore, concurrency: int) -> None:
        """``concurrency``: the number of lines that are answered at a time, of all batches together."""
        self._app = app
        self._store = store
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._batches: dict[str, _RunningBatch] = {}
        place = store.settings.place
        lock = place / "lock" if isinstance(place, Path) else place
        self._worker = SoleWorker(lock, app[ENDING], Work(self._continue_all, self._leave))

    async def start(self) -> None:
        """Go on with what is in the store, at once if no other server does. Raises StoreError."""
        if self._store.settings.place is not None:
            await self._store.call(lambda tables: None)
        await self._worker.start()

    async def _continue_all(self) -> None:
        known = [*self._batches.values()]
        found = {batch.id: batch for batch in await self._until_stored(lambda tables: tables.unfinished())}
        for batch in found.values():
            if (running := self._batches.get(batch.id)) is None:
                self._begin(batch)
            elif batch.status is BatchStatus.CANCELLING and running.batch.status in CANCELLABLE:
                running.cancel(batch)
        if self._store.is_shared:
            # Another server took them for lost while the database could not be reached.
            await end_tasks([one.task for one in known if one.batch.id not in found and one.task is not None])

    async def close(self) -> None:
        """End all tasks. What is in a folder can be continued later."""
        await self._worker.close()

    async def _leave(self) -> None:
        await end_tasks([one.task for one in self._batches.values() if one.task is not None])
        if self._store.is_shared:
            with suppress(StoreError):  # Others see it by the end of this one.
                await self._store.call(lambda tables: tables.leave())

    async def add(self, batch: Batch) -> tuple[Batch, Counts]:
        """Store a new batch and work on it. Return it, or the one of its id that was begun before.

        Raises StoreError, RepeatedRequestError.
        """
        # What is stored is begun, also if its client leaves meanwhile.
        return await asyncio.shield(self._add(batch))

    async def add_with_file(self, batch: Batch, upload: Upload, file: StoredFile) -> tuple[Batch, Counts]:
        """Do what `add` does with a batch that is stored together with its input ``file``, an upload.

        Raises StoreError, RepeatedRequestError, FileRoomError.
        """
        return await asyncio.shield(self._add_with_file(batch, upload, file))

    async def _add_with_file(self, batch: Batch, upload: Upload, file: StoredFile) -> tuple[Batch, Counts]:
        limit = self._store.settings.max_bytes
        added = await self._store.call(lambda tables: tables.add_batch_of(upload, file, batch, limit))
        if isinstance(added, int):
            raise FileRoomError(added)
        return await self._begun(batch, is_new=added is not None)

    async def _add(self, batch: Batch) -> tuple[Batch, Counts]:
        return await self._begun(batch, is_new=await self._store.add_batch(batch))

    async def _begun(self, batch: Batch, *, is_new: bool) -> tuple[Batch, Counts]:
        if is_new:
            self._begin(batch)
            return batch, Counts()
        # Its client has begun it twice at the same time.
        if (known := await self._store.batch(batch.owner, batch.id)) is None:
            raise RepeatedRequestError
        return known

    def _begin(self, batch: Batch) -> None:
        """Work on a batch that is in the store. Another server does if it has the lock."""
        if self._worker.may_work and batch.id not in self._batches:
            running = self._batches[batch.id] = _RunningBatch(batch)
            running.task = asyncio.create_task(self._run(running))

    async def cancel(self, batch: Batch) -> Batch:
        """Let a batch that has not ended end with what is answered. Return it as it is now. Raises StoreError."""
        running = self._batches.get(batch.id)
        if running is None:
            # It has ended meanwhile, or another server works on it, or will.
            found = await self._store.batch(batch.owner, batch.id)
            running = _RunningBatch(batch if found is None else found[0])
        if running.batch.status in CANCELLABLE:
            running.cancel(_reached(running.batch, BatchStatus.CANCELLING))
            if not await self._store.write_batch(running.batch):
                found = await self._store.batch(batch.owner, batch.id)
                return batch if found is None else found[0]
        return running.batch

    async def _run(self, running: _RunningBatch) -> None:
        """Work on a batch until it has ended, again and again while the store cannot be used."""
        waits = False
        try:
            while not running.batch.status.has_ended:
                try:
                    await self._step(running)
                    waits = False
                except StoreError as error:
                    if not (waits or error.is_away):
                        waits = True
                        _log.error(
                            "batch %s waits: files and batches cannot be read or written: %s", running.batch.id, error
                        )
                    await asyncio.sleep(_RETRY_S)
        finally:
            del self._batches[running.batch.id]

    async def _step(self, running: _RunningBatch) -> None:
        """Bring a batch from its status to the next one."""
        batch = running.batch
        match batch.status:
            case BatchStatus.VALIDATING:
                await self._check(running)
            case BatchStatus.IN_PROGRESS:
                await self._answer_all(running)
            case BatchStatus.CANCELLING:
                await self._finish(running, BatchStatus.CANCELLED)
            case _:
                is_late = time.time() >= batch.deadline and await self._unanswered(batch, -1)
                await self._finish(running, BatchStatus.EXPIRED if is_late else BatchStatus.COMPLETED)

    async def _check(self, running: _RunningBatch) -> None:
        batch = running.batch
        stored = await self._store.file(batch.owner, batch.input_file)
        if stored is None:
            missing = LineError("missing_file", f"There is no file {batch.input_file} any more")
            checked = CheckedLines(errors=(missing,))
        else:
            path = await self._store.path_of(stored)
            try:
                checked = await asyncio.to_thread(_checked, path, batch.endpoint)
            except OSError as error:
                raise StoreError(str(error)) from error
        if running.cancelled.is_set():
            return
        if checked.errors:
            await self._write(running, replace(_reached(batch, BatchStatus.FAILED), errors=checked.errors))
            return
        begun = replace(_reached(batch, BatchStatus.IN_PROGRESS), total=len(checked.lines))
        if not await self._store.call(lambda tables: tables.begin(begun, checked.lines)):
            await self._read_again(running)
        if running.cancelled.is_set():
            begun = replace(running.batch, total=begun.total)
            await self._store.write_batch(begun)
        running.batch = begun

    async def _answer_all(self, running: _RunningBatch) -> None:
        """Answer the lines that have no answer yet, until all have one, time is over or the batch is cancelled."""
        batch = running.batch
        work = asyncio.create_task(self._answer_lines(batch))
        cancelled = asyncio.create_task(running.cancelled.wait())
        try:
            left_s = max(0.0, batch.deadline - time.time())
            await asyncio.wait({work, cancelled}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, cancelled):
                task.cancel()
            await asyncio.wait({work, cancelled})
        if not work.cancelled():
            work.result()
        if not running.cancelled.is_set():
            await self._write(running, _reached(running.batch, BatchStatus.FINALIZING))

    async def _answer_lines(self, batch: Batch) -> None:
        stored = await self._until_stored(lambda tables: tables.file(batch.owner, batch.input_file))
        if stored is None:
            return  # They are dropped.
        path, rank = await self._store.path_of(stored), -1
        # Lines that wait for their shard leave the room to other batches, but not to more lines of their own.
        begun = asyncio.Semaphore(self._concurrency)
        async with asyncio.TaskGroup() as group:
            while lines := await self._unanswered(batch, rank):
                for line in lines:
                    await begun.acquire()
                    group.create_task(self._answer(batch, path, line)).add_done_callback(lambda _: begun.release())
                rank = lines[-1].rank

    async def _unanswered(self, batch: Batch, rank: int) -> list[Line]:
        return await self._until_stored(lambda tables: tables.unanswered(batch.id, rank))

    async def _answer(self, batch: Batch, path: Path, line: Line) -> None:
        """Answer one line and write the answer, again and again while errors pass."""
        request_id, wait_s = new_id("req"), _RETRY_S
        while True:
            try:
                async with self._room:
                    data = await self._until_stored(lambda _: _read_at(path, line))
                    if data is None:
                        return  # Its file was deleted: it is dropped.
                    client = client_named(self._app[STATE], batch.owner)
                    if client is None:
                        raise InvalidKeyError
                    request = LineRequest(app=self._app, client=client, endpoint=batch.endpoint, request_id=request_id)
                    reply = await answer_line(request, read_line(data).body)
                status, kind = 200, AnswerKind.COMPLETED
            except (RequestError, EngineError, StoreError) as error:
                dialect = ENDPOINTS[batch.endpoint].dialect
                status = dialect.status(kind_of(error))
                # The next day or month may be after the batch.
                if (status in _PASSING and not isinstance(error, BudgetError)) or self._may_join(error):
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, _MOST_RETRY_S)
                    continue
                reply, kind = dialect.body(error, request_id), AnswerKind.FAILED
            except Exception as error:  # noqa: BLE001  whatever a bug raises: it ends this line alone
                _log.exception("line %s of batch %s failed", line.number + 1, batch.id)
                dialect = ENDPOINTS[batch.endpoint].dialect
                status, reply = 500, dialect.body(error, request_id)
                kind = AnswerKind.FAILED
            break
        answered = AnsweredLine(
            id=new_id("batch_req"),
            custom_id=line.custom_id,
            response=_LineResponse(status, request_id, msgspec.Raw(reply)),
        )
        await self._keep(batch, Answered(line.number, msgspec.json.encode(answered), kind))

    def _may_join(self, error: Exception) -> bool:
        """Whether a model is unknown that may only not have joined yet, as after a restart of the server."""
        return isinstance(error, UnknownModelError) and time.time() < self._app[STATE].started_s + _JOIN_S

    async def _keep(self, batch: Batch, answered: Answered) -> None:
        await self._until_stored(lambda tables: tables.answered(batch.id, answered))

    async def _until_stored(self, work: Callable[[Tables], T]) -> T:
        """Read or write, again and again while the store cannot be used: an answer is not computed twice."""
        waits = False
        while True:
            try:
                return await self._store.call(work)
            except StoreError as error:
                if not (waits or error.is_away):
                    waits = True
                    _log.error("batches wait: they cannot be read or written: %s", error)
                await asyncio.sleep(_RETRY_S)

    async def _finish(self, running: _RunningBatch, status: BatchStatus) -> None:
        """Write the output files, with an error for each line that has no answer."""
        batch, failure = running.batch, _DROPPED.get(status, _DROPPED[BatchStatus.EXPIRED])
        while lines := await self._unanswered(batch, -1):
            for line in lines:
                dropped = AnsweredLine(id=new_id("batch_req"), custom_id=line.custom_id, error=failure)
                await self._keep(batch, Answered(line.number, msgspec.json.encode(dropped), AnswerKind.DROPPED))
        found = await self._store.batch(batch.owner, batch.id)
        assert found is not None, "only batches that have ended are deleted"
        counts = found[1]
        if batch.output_file is None and batch.error_file is None:
            # Known before the files are written, so that a server that is killed meanwhile writes the same ones again.
            named = replace(
                batch,
                output_file=new_id("file") if counts.completed else None,
                error_file=new_id("file") if counts.failed or counts.dropped else None,
            )
            await self._write(running, named)
        ended = _reached(running.batch, status)
        if await self._store.call(lambda tables: tables.finish(ended)):
            running.batch = ended
        else:
            await self._read_again(running)

    async def _write(self, running: _RunningBatch, batch: Batch) -> None:
        if not await self._store.write_batch(batch):
            await self._read_again(running)
        elif batch.status is BatchStatus.CANCELLING or not running.cancelled.is_set():
            running.batch = batch

    async def _read_again(self, running: _RunningBatch) -> None:
        """Note that a batch was cancelled. Raises StoreError if another server works on it."""
        found = await self._store.batch(running.batch.owner, running.batch.id)
        if found is None or found[0].status is not BatchStatus.CANCELLING:
            raise StoreError("another server works on it")
        running.cancel(found[0])


def _reached(batch: Batch, status: BatchStatus) -> Batch:
    return replace(batch, status=status, times={**batch.times, status: time.time()})


def _checked(path: Path, endpoint: str) -> CheckedLines:
    with path.open("rb") as file:
        return checked_lines(file, endpoint)


def _read_at(path: Path, line: Line) -> bytes | None:
    """Return a line; None if the file is not there any more."""
    try:
        with path.open("rb") as file:
            file.seek(line.start)
            return file.read(line.size)
    except FileNotFoundError:
        return None


RUNNING_BATCHES = web.AppKey("running_batches", RunningBatches)
BULK = web.AppKey("bulk", BulkStore)
