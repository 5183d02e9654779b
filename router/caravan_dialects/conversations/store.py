"""The store of conversations, for asyncio: the database is used in a thread."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from caravan_dialects.conversations.database import Bounds, Database
from caravan_dialects.conversations.job_table import JobTable
from caravan_dialects.conversations.nodes import Added, Chain, Head, Job, Position, Step, Transaction, UnderWay
from caravan_dialects.sql.connection import SQL_ERRORS, Place
from caravan_dialects.sql.outage import Outage, is_away
from caravan_scheduler.core.tokens import GeneratedToken

T = TypeVar("T")

log = logging.getLogger(__name__)


# While a database is away, which comes back after a restart, what runs waits for so long, and tries so often.
_PATIENCE_S, _RETRY_S = 30.0, 0.5


class StoreError(Exception):
    """The store cannot be read or written, for example because its disk is full."""

    @property
    def is_away(self) -> bool:
        """Whether its database could not be reached. The store logs that."""
        return is_away(self.__cause__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """``place``: where conversations outlive the router; None keeps them in memory.

    ``job_life_s``: how long the events of a response are kept that was generated in the background.
    """

    place: Place = None
    max_bytes: int = 256 << 20
    life_s: float = 3600.0
    job_life_s: float = 28_800.0


class Store:
    """Responses and conversations by owner, the name of an API key. Another owner's entries are not there.

    The methods that read or write an entry raise StoreError.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._pins: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, "conversations")
        self._database: Database | None = None
        self._outage = Outage("responses and conversations")

    @property
    def place(self) -> Place:
        """Where conversations outlive the router."""
        return self._settings.place

    @property
    def is_shared(self) -> bool:
        """Whether several servers use the store at a time."""
        return isinstance(self.place, str)

    async def open(self) -> None:
        """Connect to the database. Otherwise the first call does it. Raises StateFileError."""
        await self._call(lambda _: None)

    async def close(self) -> None:
        """Finish the calls that run, and close the database."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._database is not None:
            self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    @contextmanager
    def pinning(self, entry: str) -> Iterator[None]:
        """Keep the response or conversation of this id, if there is one, to the end of the block."""
        self._pins[entry] += 1
        try:
            yield
        finally:
            self._pins[entry] -= 1
            if not self._pins[entry]:
                del self._pins[entry]

    async def chain(self, owner: str, end: str | Position) -> Chain | None:
        """Return the chain that ends with the response of an id, or at a position; None if the owner has none."""
        if isinstance(end, Position):
            return await self._call(lambda database: database.chain(owner, end))
        return await self._call(lambda database: database.node(owner, end, time.time()))

    async def response(self, owner: str, response_id: str) -> bytes | None:
        """Return the JSON of a response; None if the owner has none of this id. Takes the same time at any length."""
        return await self._call(lambda database: database.response(owner, response_id, time.time()))

    async def conversation(self, owner: str, conversation_id: str) -> tuple[Head, Chain] | None:
        """Return a conversation and its chain; None if the owner has none of this id."""
        return await self._call(lambda database: database.conversation(owner, conversation_id, time.time()))

    async def head(self, owner: str, conversation_id: str) -> Head | None:
        """Return a conversation; None if the owner has none of this id. Takes the same time at any length."""
        return await self._call(lambda database: database.head(owner, conversation_id, time.time()))

    async def commit(self, owner: str, transaction: Transaction) -> bool:
        """Write all of ``transaction``; return False and write nothing if its head has moved or its parent is gone.

        So it is with a job that was deleted, or that another server has taken over.
        """
        call = self._call if transaction.ended is None else self._patiently
        return await call(lambda database: database.commit(owner, transaction, time.time()))

    async def delete_response(self, owner: str, response_id: str) -> bool:
        """Forget a response; return whether there was one. Responses that continue it stay."""
        return await self._call(lambda database: database.delete_response(owner, response_id))

    async def add_job(self, job: Job, step: Step, most: int) -> Added:
        """Add a job with its first step. ``most``: that its owner may have, in a store that several servers use."""
        return await self._call(lambda database: database.jobs.add(job, step, time.time(), most))

    async def append(self, job_id: str, step: Step) -> bool:
        """Add the next step of a job. Nothing is lost from then on if the process is killed.

        Return False and add nothing if the job was deleted, or another server has taken it over.
        """
        return await self._patiently(lambda database: database.jobs.append(job_id, step))

    async def replace_tokens(self, job_id: str, step: Step, request: bytes) -> bool:
        """Add a step as `append` does, and store ``request`` in place of that of the job and of all its tokens."""
        return await self._patiently(lambda database: database.jobs.replace_tokens(job_id, step, request))

    async def job(self, owner: str, job_id: str) -> Job | None:
        """Return a job; None if the owner has none of this id."""
        return await self._call(lambda database: database.jobs.find(owner, job_id))

    async def jobs_under_way(self, passed_on: Collection[str] = ()) -> list[UnderWay]:
        """Return the jobs of all owners that have not ended, without those that other servers work on.

        ``passed_on``: see `JobTable.under_way`.
        """
        return await self._call(lambda database: database.jobs.under_way(passed_on))

    async def on_jobs(self, work: Callable[[JobTable], T]) -> T:
        """Return what ``work`` returns, which is called in the thread of the store."""
        return await self._call(lambda database: work(database.jobs))

    async def events(self, job_id: str, first: int) -> list[bytes]:
        """Return some events of a job, from the number ``first`` on; none if there are none yet."""
        return await self._call(lambda database: database.jobs.events(job_id, first))

    async def tokens(self, job_id: str) -> tuple[list[GeneratedToken], float | None]:
        """Return the tokens of a job so far, and the feedback of the last one."""
        return await self._call(lambda database: database.jobs.tokens(job_id))

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        """Forget a conversation; return whether there was one. Its responses stay."""
        return await self._call(lambda database: database.delete_head(owner, conversation_id))

    async def _patiently(self, work: Callable[[Database], T]) -> T:
        """Like `_call`, but wait while a database is away, so that what runs is not disturbed. Raises StoreError."""
        until = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self._call(work)
            except StoreError as error:
                if not error.is_away or time.monotonic() >= until:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def _call(self, work: Callable[[Database], T]) -> T:
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(self._opened()))
        except SQL_ERRORS as error:
            if not self._outage.failed(error):
                log.error("responses and conversations cannot be read or written: %s", error)
            raise StoreError from error
        self._outage.worked()
        return done

    def _opened(self) -> Database:
        if self._database is None:
            settings = self._settings
            bounds = Bounds(max_bytes=settings.max_bytes, life_s=settings.life_s, job_life_s=settings.job_life_s)
            self._database = Database(settings.place, bounds, self._pins)
        return self._database
