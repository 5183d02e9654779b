"""Counts what API keys use while the router runs, for asyncio: SQLite and the audit log have a thread of their own."""

import asyncio
import glob
import logging
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from caravan_dialects.api.errors import UsageUnreadableError
from caravan_dialects.auth.usage import DAY_S, Account, Counts, Kind, Spent
from caravan_router.accounting.audit_log import AuditLog, described
from caravan_router.accounting.journal import Journal, abandoned, read_journal
from caravan_router.accounting.ledger import Ended, Ledger, Row
from caravan_router.accounting.table import UsageFileError, UsageTable
from caravan_router.engine.batcher import Batcher
from caravan_scheduler.actions import Action
from caravan_scheduler.events import Event

T = TypeVar("T")

_log = logging.getLogger(__name__)
# What was counted is written to the store once in this many seconds, and what others have counted is read.
_SAVE_S, _ELSEWHERE_S = 2.0, 20.0
_KEPT_DAYS = 400
_MOST_ENDED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountsSettings:
    """``file``: where usage outlives the router; None keeps it in memory. ``audit_log``: None for none."""

    file: Path | None = None
    audit_log: Path | None = None


class Accounts:
    """The usage of all API keys, and the audit log."""

    def __init__(self, settings: AccountsSettings, now: Callable[[], float] = time.time) -> None:
        """``now`` returns seconds since 1970."""
        self._file = settings.file
        self._audit_path = settings.audit_log
        self._now = now
        self._run = os.urandom(8).hex()
        self._thread = ThreadPoolExecutor(1, "usage")
        self._table: UsageTable | None = None
        self._journal: Journal | None = None
        self._audit: AuditLog | None = None
        # Requests that have ended, and when, for the audit log; the latest if it cannot be written for long.
        self._ended: deque[tuple[Ended, float]] = deque(maxlen=_MOST_ENDED)
        self._auditing: asyncio.Future[None] | None = None
        self.ledger = Ledger(self._day, self._note_end)
        # Changed since it was saved.
        self._unsaved: set[Row] = set()
        # Whether a write has failed since the last one that succeeded: not each failure is logged.
        self._is_failing = False
        self._is_closed = False

    @property
    def _day(self) -> int:
        return int(self._now() // DAY_S)

    async def open(self) -> None:
        """Open the files, and take over what routers have counted that were killed.

        Raises UsageFileError, AuditLogError.
        """
        await self._call(self._open)
        await self.read_elsewhere()

    def _open(self, table: UsageTable) -> None:
        if self._file is not None:
            folder, name = self._file.parent, self._file.name
            try:
                for path, content in abandoned(sorted(folder.glob(f"{glob.escape(name)}-*.journal"))):
                    run = path.name.removeprefix(f"{name}-").removesuffix(".journal")
                    table.save(run, read_journal(content))
                    path.unlink()
                self._journal = Journal(folder / f"{name}-{self._run}.journal")
            except (OSError, sqlite3.Error) as error:
                raise UsageFileError(f"{self._file}: {error}") from error
        if self._audit_path is not None:
            self._audit = AuditLog(self._audit_path)
        table.forget_before(self._day - _KEPT_DAYS)

    async def run(self) -> None:
        """Save what is counted now and then, until cancelled."""
        elsewhere_s = time.monotonic()
        while True:
            await asyncio.sleep(_SAVE_S)
            try:
                await self.save()
                if time.monotonic() - elsewhere_s >= _ELSEWHERE_S:
                    elsewhere_s = time.monotonic()
                    await self.read_elsewhere()
                self._write_audit()
            except (sqlite3.Error, OSError) as error:
                self._failed(error)
            else:
                self._is_failing = False

    async def read_elsewhere(self) -> None:
        """Find what other routers with the same file have counted. Raises sqlite3.Error."""
        self.ledger.set_elsewhere(await self._call(partial(UsageTable.spent, day=self._day, but=self._run)))

    async def close(self) -> None:
        """Save everything, and close the files. What is decided afterwards reaches no client, and does not count."""
        self.ledger.end_all()
        self._is_closed = True
        is_saved = True
        try:
            await self.save()
        except sqlite3.Error as error:
            _log.error("usage could not be saved, and stays in the journal: %s", error)
            is_saved = False
        self._write_audit()
        if self._auditing is not None:
            await self._auditing
        if self._table is not None:
            await self._call(partial(self._close, is_saved=is_saved))
        await asyncio.to_thread(self._thread.shutdown)

    def _close(self, table: UsageTable, *, is_saved: bool) -> None:
        if self._journal is not None:
            self._journal.close(is_saved=is_saved)
        if self._audit is not None:
            self._audit.close()
        table.close()

    def follow(self, batcher: Batcher) -> None:
        """Count what this engine computes."""
        name = batcher.model.name
        batcher.followers.append(_ModelAccounts(self, name))
        batcher.queries.on_embedded = lambda key, texts: self.count_texts(name, key, texts)

    def note(self, model: str, events: list[Event], actions: list[Action]) -> None:
        """Count what the scheduler of ``model`` has decided, before it is carried out."""
        if not self._is_closed:
            self.ledger.note(model, events, actions, self._day)
            self._write()

    def count_texts(self, model: str, key: str, texts: Sequence[Sequence[int]]) -> None:
        """Count a request for vectors or scores of ``texts``."""
        if not self._is_closed:
            self.ledger.count_texts(model, key, texts, self._day)
            self._write()

    def _write(self) -> None:
        """Let what was counted survive this process."""
        touched = self.ledger.touched
        if not touched:
            return
        try:
            if self._journal is not None:
                self._journal.write(touched)
            self._unsaved |= touched
            touched.clear()
        except OSError as error:
            # The next step tries again.
            self._failed(error)

    def _note_end(self, ended: Ended) -> None:
        if self._audit is not None:
            self._ended.append((ended, self._now()))
            self._write_audit()

    def _write_audit(self) -> None:
        """Begin to write what has ended, unless that is being done."""
        if self._auditing is None and self._ended:
            self._auditing = asyncio.ensure_future(self._audited())

    async def _audited(self) -> None:
        audit = self._audit
        assert audit is not None
        try:
            while self._ended:
                batch = list(self._ended)
                self._ended.clear()
                try:
                    await self._call(partial(_append, audit=audit, batch=batch))
                except OSError as error:
                    # The next end tries again.
                    self._ended.extendleft(reversed(batch))
                    self._failed(error)
                    break
        finally:
            self._auditing = None

    def _failed(self, error: Exception) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error("usage or the audit log cannot be written, requests go on: %s", error)

    async def save(self) -> None:
        """Write to the store what has changed. Raises sqlite3.Error."""
        changed = self._unsaved | self.ledger.touched
        self._unsaved = set()
        # Here, since the counts go on changing.
        rows = [(row.account, Counts(*row.counts)) for row in changed]
        try:
            if rows:
                await self._call(partial(UsageTable.save, run=self._run, rows=rows))
        except BaseException:
            self._unsaved |= changed
            raise
        # Saves end in the order in which they began, so no other one has these rows still.
        for row in self.ledger.forget_ended_days(self._unsaved | self.ledger.touched):
            if self._journal is not None:
                self._journal.release(row)

    def spent(self, key: str) -> Spent:
        """Return what the key of this name has used."""
        self.ledger.begin(self._day)
        return self.ledger.spent(key)

    async def read(
        self, days: range, kind: Kind, groups: Sequence[str], only: dict[str, list[str]]
    ) -> list[tuple[Account, Counts]]:
        """Return what was counted so far, as `UsageTable.read` does. Raises UsageUnreadableError."""
        try:
            await self.save()
            return await self._call(lambda table: table.read(days, kind, groups, only))
        except sqlite3.Error as error:
            _log.error("usage cannot be read: %s", error)
            raise UsageUnreadableError from error

    async def _call(self, work: Callable[[UsageTable], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._opened()))

    def _opened(self) -> UsageTable:
        if self._table is None:
            self._table = UsageTable(self._file)
        return self._table


def _append(_: UsageTable, audit: AuditLog, batch: list[tuple[Ended, float]]) -> None:
    audit.append(described(ended, now_s) for ended, now_s in batch)


class _ModelAccounts:
    """Is told what the scheduler of ``model`` hears and decides."""

    def __init__(self, accounts: Accounts, model: str) -> None:
        self._accounts = accounts
        self._model = model

    def hear(self, events: list[Event]) -> None:
        """Nothing counts before it is decided."""

    def note(self, events: list[Event], actions: list[Action], _now: float) -> None:
        """Count what was decided."""
        self._accounts.note(self._model, events, actions)
