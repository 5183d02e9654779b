"""Keeps files and batches, for asyncio: the database and the disk are used in a thread."""

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from caravan_dialects.bulk.file_table import INCOMING, FileTable, Upload, file_of_row
from caravan_dialects.bulk.parts import Parts
from caravan_dialects.bulk.records import Answered, AnswerKind, Batch, BatchStatus, Counts, Line, StoredFile
from caravan_dialects.bulk.tables import ADD_BATCH, VERSIONS, WRITE_BATCH
from caravan_dialects.conversations.store import StoreError
from caravan_dialects.sql.connection import SQL_ERRORS, Place, VersionError, connected
from caravan_dialects.sql.outage import Outage

T = TypeVar("T")
_SCHEMA = "caravan_files"
# Expired files are looked for once in this many seconds.
_SWEEP_S = 10.0
# An upload to which nothing was added for so long was cut off by the end of its server.
_STALE_S = 3600.0
_BATCH = msgspec.json.Decoder(Batch)
_LINES_AT_ONCE, _ANSWERS_AT_ONCE = 1_000, 100
_UNFINISHED = "status NOT IN ({})".format(", ".join(f"'{one}'" for one in BatchStatus if one.has_ended))


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkSettings:
    """``place``: where files and batches outlive the server, a folder or the URL of a PostgreSQL database.

    None keeps them in a folder that goes with the server. From a database, it copies the files that it reads into one.

    ``max_bytes``: of all files together, with answers that are not in a file yet. An owner may have as much as it
    leaves free. ``life_s``: of a file for which nobody names another.
    """

    place: Place = None
    max_bytes: int = 1 << 30
    life_s: float = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Page:
    """``after``: id of the entry before the first one; None for the first page."""

    limit: int
    after: str | None = None
    newest_first: bool = True


class BulkStore:
    """Files and batches by owner, the name of an API key. Another owner's are not there.

    The coroutines raise StoreError.
    """

    def __init__(self, settings: BulkSettings) -> None:
        self.settings = settings
        self._thread = ThreadPoolExecutor(1, "bulk")
        self._opened: Tables | None = None
        self._temporary: str | None = None
        self._outage = Outage("files and batches")

    async def close(self) -> None:
        """Finish the calls that run, and close the tables."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._opened is not None:
            self._thread.submit(self._opened.close).result()
        self._thread.shutdown()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    @asynccontextmanager
    async def uploading(self) -> AsyncIterator[Upload]:
        """Return a new file to `write` to. It is removed at the end of the block unless it was kept."""
        upload = await self.call(lambda tables: tables.begin_upload())
        try:
            yield upload
        finally:
            await asyncio.shield(self.call(lambda _: upload.close()))

    async def write(self, upload: Upload, data: bytes) -> None:
        """Add bytes to an upload."""
        await self.call(lambda _: upload.write(data))

    async def room(self, owner: str) -> int:
        """Return how many bytes more ``owner`` may have."""
        return await self.call(lambda tables: tables.room(owner, self.settings.max_bytes))

    async def keep(self, upload: Upload, file: StoredFile) -> StoredFile | int:
        """Keep an upload as ``file``, and return that, or the file of this id that was kept before.

        If it does not fit, return how many bytes more its owner may have.
        """
        return await self.call(lambda tables: tables.keep_upload(upload, file, self.settings.max_bytes))

    async def file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a file; None if the owner has none of this id."""
        return await self.call(lambda tables: tables.file(owner, file_id))

    async def path_of(self, file: StoredFile) -> Path:
        """Return where the content of a file is. If it was deleted meanwhile, there is nothing."""
        return await self.call(lambda tables: tables.path_of(file.id))

    async def files(self, owner: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Return the files of a page, and one more if others follow."""
        return await self.call(lambda tables: tables.files(owner, page, purpose))

    async def delete_file(self, owner: str, file_id: str) -> bool:
        """Remove a file; return whether there was one."""
        return await self.call(lambda tables: tables.delete_file(owner, file_id))

    @property
    def is_shared(self) -> bool:
        """Whether several servers use the store at a time."""
        return isinstance(self.settings.place, str)

    async def add_batch(self, batch: Batch) -> bool:
        """Add a batch; return False if there is one of this id."""
        return await self.call(lambda tables: tables.write_batch(batch, is_new=True))

    async def write_batch(self, batch: Batch) -> bool:
        """Write a batch as it is now; return False if it may not be written, see `WRITE_BATCH`."""
        return await self.call(lambda tables: tables.write_batch(batch))

    async def batch(self, owner: str, batch_id: str) -> tuple[Batch, Counts] | None:
        """Return a batch and what is answered of it; None if the owner has none of this id."""
        return await self.call(lambda tables: tables.batch(owner, batch_id))

    async def batches(self, owner: str, page: Page, *, anthropic: bool) -> list[tuple[Batch, Counts]]:
        """Return the batches of a page, and one more if others follow."""
        return await self.call(lambda tables: tables.batches(owner, page, anthropic=anthropic))

    async def delete_batch(self, owner: str, batch_id: str) -> bool:
        """Remove a batch that has ended, and its files; return whether there was one."""
        return await self.call(lambda tables: tables.delete_batch(owner, batch_id))

    async def call(self, work: "Callable[[Tables], T]") -> T:
        """Run ``work`` in the thread of the store."""
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._tables()))
        except (*SQL_ERRORS, VersionError, OSError) as error:
            self._outage.failed(error)
            raise StoreError(str(error)) from error
        self._outage.worked()
        return done

    def _tables(self) -> "Tables":
        if self._opened is None:
            place = self.settings.place
            if not isinstance(place, Path):
                self._temporary = self._temporary or tempfile.mkdtemp(prefix="caravan-files-")
                place = Path(self._temporary)
            self._opened = Tables(place, self.settings)
        return self._opened


class Tables:
    """The tables and the folder. All calls block and come from one thread."""

    def __init__(self, folder: Path, settings: BulkSettings) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder = folder
        self._life_s = settings.life_s
        self._swept = 0.0
        place = settings.place
        self._connection = connected(place if isinstance(place, str) else folder / "bulk.sqlite", _SCHEMA)
        self._connection.migrate(VERSIONS)
        self._parts = Parts(self._connection, folder) if self._connection.is_shared else None
        self._files = FileTable(self._connection, folder, self._parts)

    def close(self) -> None:
        """Close the tables."""
        self._connection.close()

    def begin_upload(self) -> Upload:
        """Return a new file to write to."""
        return self._files.begin_upload()

    def room(self, owner: str, limit: int) -> int:
        """Return how many bytes more ``owner`` may have, if all may have ``limit``."""
        self._sweep()
        return self._files.room(owner, limit)

    def keep_upload(self, upload: Upload, file: StoredFile, limit: int) -> StoredFile | int:
        """Make an upload a file, and return that, or the file of this id that was kept before.

        If it does not fit, also because of others meanwhile, return the `room`.
        """
        self._sweep()
        return self._files.add(upload, file, limit)

    def path_of(self, file_id: str) -> Path:
        """Return where the content of a file is, which may have to be copied there first."""
        return self._files.path_of(file_id)

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """Return a file; None if the owner has none of this id."""
        self._sweep()
        return self._files.find(owner, file_id)

    def files(self, owner: str, page: Page, purpose: str | None) -> list[StoredFile]:
        """Return the files of a page, and one more if others follow. ``purpose``: of these alone."""
        self._sweep()
        rows = self._paged("files", owner, page, "(? IS NULL OR purpose = ?)", (purpose, purpose))
        return [file_of_row(row) for row in rows]

    def delete_file(self, owner: str, file_id: str) -> bool:
        """Remove a file; return whether there was one."""
        return self._files.delete(owner, file_id)

    def _sweep(self) -> None:
        now = time.time()
        if now - self._swept < _SWEEP_S:
            return
        self._swept = now
        expired = self._connection.execute("SELECT id, owner FROM files WHERE expires < ?", (now,)).fetchall()
        needed = {batch.input_file for batch in self._unfinished()} if expired else set()
        for file_id, owner in expired:
            if file_id not in needed:
                self.delete_file(owner, file_id)
        for path in self.folder.glob(f"{INCOMING}_*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < now - _STALE_S:
                    path.unlink()
        if self._parts is not None:
            self._parts.forget_copies(but=INCOMING)

    def write_batch(self, batch: Batch, *, is_new: bool = False) -> bool:
        """Write a batch as it is now; return False if it may not be written, see `WRITE_BATCH`.

        ``is_new``: only if there is none of this id.
        """
        record, server = msgspec.json.encode(batch), self._connection.server
        row = (batch.id, batch.owner, batch.status, batch.created, record, server)
        return self._connection.execute(ADD_BATCH if is_new else WRITE_BATCH, row).rowcount > 0

    def add_batch_of(self, upload: Upload, file: StoredFile, batch: Batch, limit: int) -> StoredFile | int | None:
        """Add a batch together with its input file, or neither. Return the file; None if there is a batch of this id.

        If the file does not fit, return the `room`.
        """
        self._sweep()
        with self._files.keeping(upload):
            room = self._files.room(file.owner, limit)
            if file.size > room:
                return room
            if not self.write_batch(batch, is_new=True):
                return None
            self._files.write(upload, file)
        return file

    def batch(self, owner: str, batch_id: str) -> tuple[Batch, Counts] | None:
        """Return a batch and what is answered of it; None if the owner has none of this id."""
        row = self._connection.execute(
            "SELECT record FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
        ).fetchone()
        return None if row is None else self._counted(_BATCH.decode(row[0]))

    def batches(self, owner: str, page: Page, *, anthropic: bool) -> list[tuple[Batch, Counts]]:
        """Return the batches of a page, and one more if others follow. ``anthropic``: Anthropic's, or OpenAI's."""
        is_message = "id LIKE 'msgbatch%'"
        rows = self._paged("batches", owner, page, is_message if anthropic else f"NOT {is_message}", ())
        return [self._counted(_BATCH.decode(row[4])) for row in rows]

    def _counted(self, batch: Batch) -> tuple[Batch, Counts]:
        if batch.counts is not None:
            return batch, batch.counts
        query = "SELECT kind, count(*) FROM lines WHERE batch = ? AND answer IS NOT NULL GROUP BY kind"
        by_kind = dict(self._connection.execute(query, (batch.id,)))
        return batch, Counts(*(by_kind.get(kind, 0) for kind in AnswerKind))

    def delete_batch(self, owner: str, batch_id: str) -> bool:
        """Remove a batch that has ended, and its files; return whether there was one."""
        found = self.batch(owner, batch_id)
        if found is None or not found[0].status.has_ended:
            return False
        self._connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
        for file_id in (found[0].input_file, found[0].output_file, found[0].error_file):
            if file_id is not None:
                self.delete_file(owner, file_id)
        return True

    def unfinished(self) -> list[Batch]:
        """Return the batches of all owners that have not ended and no other server works on, the oldest first."""
        self._connection.claim("batches", _UNFINISHED)
        return self._unfinished("server = ?", self._connection.server)

    def _unfinished(self, condition: str = "TRUE", *values: int) -> list[Batch]:
        query = f"SELECT record FROM batches WHERE {_UNFINISHED} AND {condition} ORDER BY created"  # noqa: S608
        return [_BATCH.decode(record) for (record,) in self._connection.execute(query, values)]

    def leave(self) -> None:
        """Let other servers work on the batches of this one."""
        query = f"UPDATE batches SET server = 0 WHERE {_UNFINISHED} AND server = ?"  # noqa: S608
        self._connection.execute(query, (self._connection.server,))

    def begin(self, batch: Batch, lines: Sequence[Line]) -> bool:
        """Write the checked lines of a batch together with its new status. Return False if that may not be written."""
        with self._connection.transaction():
            self._connection.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, NULL, NULL) ON CONFLICT DO NOTHING",
                ((batch.id, one.number, one.custom_id, one.start, one.size, one.rank) for one in lines),
            )
            return self.write_batch(batch)

    def unanswered(self, batch_id: str, after: int) -> list[Line]:
        """Return the next lines without an answer, in their order. ``after``: the rank before the first one."""
        rows = self._connection.execute(
            "SELECT number, custom_id, start, size, rank FROM lines "
            "WHERE batch = ? AND rank > ? AND answer IS NULL ORDER BY rank LIMIT ?",
            (batch_id, after, _LINES_AT_ONCE),
        )
        return [
            Line(number=number, custom_id=custom_id, start=start, size=size, rank=rank)
            for number, custom_id, start, size, rank in rows
        ]

    def answered(self, batch_id: str, answer: Answered) -> None:
        """Write the answer of a line. It counts from then on."""
        self._connection.execute(
            "UPDATE lines SET answer = ?, kind = ? WHERE batch = ? AND number = ? AND answer IS NULL",
            (answer.answer, answer.kind, batch_id, answer.number),
        )

    def finish(self, batch: Batch) -> bool:
        """Write the output files of a batch, and then the batch itself, of whose lines only the counts stay.

        Return False if the batch may not be written, because another server works on it by now.

        A server that is killed in between writes the same files again.
        """
        now = time.time()
        for file_id, failed in ((batch.output_file, False), (batch.error_file, True)):
            if file_id is None:
                continue
            upload = self.begin_upload()
            for answer in self._answers(batch.id, failed=failed):
                upload.write(answer)
            life_s = self._life_s if batch.output_life_s is None else batch.output_life_s
            kind = "error" if failed else "output"
            stored = StoredFile(
                id=file_id,
                owner=batch.owner,
                purpose="batch_output",
                name=f"{batch.id}_{kind}.jsonl",
                size=upload.size,
                created=now,
                expires=now + life_s,
            )
            self._files.write_again(upload, stored)
        _, counts = self._counted(batch)
        with self._connection.transaction():
            written = self.write_batch(replace(batch, counts=counts))
            if written:
                self._connection.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
        return written

    def _answers(self, batch_id: str, *, failed: bool) -> Iterator[bytes]:
        query = (
            "SELECT number, answer FROM lines WHERE batch = ? AND (kind > 0) = ? AND number > ? ORDER BY number LIMIT ?"
        )
        last = -1
        while rows := self._connection.execute(query, (batch_id, failed, last, _ANSWERS_AT_ONCE)).fetchall():
            for last, answer in rows:  # noqa: B007  the next query begins after it
                yield bytes(answer) + b"\n"

    def _paged(self, table: str, owner: str, page: Page, condition: str, given: Sequence[Any]) -> list[Any]:
        order, before = ("DESC", "<") if page.newest_first else ("ASC", ">")
        follows, place = "", tuple[str, ...]()
        if page.after is not None:
            follows = f"AND (created, id) {before} (SELECT created, id FROM {table} WHERE id = ? AND owner = ?)"  # noqa: S608
            place = (page.after, owner)
        query = f"SELECT * FROM {table} WHERE owner = ? AND {condition} {follows} ORDER BY created {order}, id {order} "  # noqa: S608
        return self._connection.execute(f"{query} LIMIT ?", (owner, *given, *place, page.limit + 1)).fetchall()
