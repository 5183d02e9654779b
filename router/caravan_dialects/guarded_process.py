"""Child processes for work on what strangers made. They may die or hang at any time, and are then replaced.

A request that uses up its processor time ends its process; one that has no reply for longer, because its process is
stopped or starved of CPU, is asked again of a new process. What runs in a process is in `guarded_child`.
"""

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from caravan_dialects.guarded_child import LENGTH_BYTES, framed

_log = logging.getLogger(__name__)

# How a fault of the code that runs in a process ends it.
_FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
# Extra time for the first request of a process, which includes its start.
_START_S = 20.0


class Ended(Enum):
    """How a process ended without a reply."""

    TIME = "it used up its processor time"
    DIED = "it died"
    HUNG = "it neither answered nor ended"
    KILLED = "it was killed"
    ABSENT = "it could not be started"


class ProcessEndedError(Exception):
    """Processes ended, or were ended, before they replied. ``how``: the last one."""

    def __init__(self, how: Ended) -> None:
        super().__init__(f"a process for this failed: {how.value}")
        self.how = how

    @property
    def blames_request(self) -> bool:
        """Whether the request may be why; else the host is."""
        return self.how in {Ended.TIME, Ended.DIED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What runs in the processes: ``module`` answers one request after another with `guarded_child.serve`.

    ``time_limit_s``: processor time for each. ``grace_s``: how much longer one may take, where no processor is free.
    """

    module: str
    processes: int
    time_limit_s: float
    grace_s: float


class GuardedProcesses:
    """Starts processes when they are first needed, keeps them until ``close``, and replaces those that ended."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._turns = asyncio.Semaphore(worker.processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._closed = False

    async def ask(self, request: bytes) -> bytes:
        """Return the reply of an idle process or of a new one; if it ends for another reason than its time, of another.

        Raises ProcessEndedError.
        """
        try:
            return await self._ask(request, anew=False)
        except ProcessEndedError as error:
            if error.how is Ended.TIME:
                raise
            _log.warning(
                "a helper process ended, another one is asked: %s", error, extra={"worker": self._worker.module}
            )
        return await self._ask(request, anew=True)

    async def _ask(self, request: bytes, *, anew: bool) -> bytes:
        async with self._turns:
            # One that died while it was idle has lost no request.
            while self._idle and self._idle[-1].returncode is not None:
                await _end(self._idle.pop())
            new = anew or not self._idle
            process = await self._start() if new else self._idle.pop()
            return await self._answer(process, request, _START_S if new else 0)

    async def close(self) -> None:
        """End all processes. Call this when nothing is asked any more."""
        self._closed = True
        while self._idle:
            await _end(self._idle.pop())

    @property
    def idle_pids(self) -> list[int]:
        """The ids of the processes that wait for a request."""
        return [process.pid for process in self._idle]

    async def _answer(self, process: asyncio.subprocess.Process, request: bytes, start_s: float) -> bytes:
        answered = False
        how = Ended.DIED
        try:
            async with asyncio.timeout(self._worker.time_limit_s + self._worker.grace_s + start_s):
                reply = await _exchange(process, request)
            answered = True
            return reply
        except TimeoutError:
            how = Ended.HUNG
        except (EOFError, ConnectionError):
            # It is ending. Killed before that is known, it would not be known how it ended.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._worker.grace_s):
                    await process.wait()
        finally:
            # One without a reply still works, also after the client has left: it cannot serve the next request.
            if answered and not self._closed and len(self._idle) < self._worker.processes:
                self._idle.append(process)
            else:
                await _end(process)
        raise ProcessEndedError(_ended(process.returncode, how))

    async def _start(self) -> asyncio.subprocess.Process:
        # It gets no more of the environment than it needs, so that nobody's file can read keys or tokens in it.
        environment = {name: os.environ[name] for name in ("PYTHONPATH", "TZ") if name in os.environ}
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._worker.module,
                str(self._worker.time_limit_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                # Ctrl-C is for the router, which drains first.
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessEndedError(Ended.ABSENT) from error


def _ended(code: int | None, how: Ended) -> Ended:
    """Return how a process ended: by its exit code, unless it was ended because it hung."""
    if how is Ended.HUNG or code is None:
        return how
    if code == -signal.SIGPROF:
        return Ended.TIME
    return Ended.KILLED if code < 0 and -code not in _FAULTS else Ended.DIED


async def _exchange(process: asyncio.subprocess.Process, request: bytes) -> bytes:
    """Send one request and read its reply. Raises EOFError or ConnectionError if the process ends before it replies."""
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdin.is_closing():
        # It ended, which may not be known yet. The transports of uvloop would raise RuntimeError.
        raise BrokenPipeError
    process.stdin.write(framed(request))
    await process.stdin.drain()
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return await process.stdout.readexactly(int.from_bytes(head, "big"))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    # Read the rest of the output and close the pipes.
    await process.communicate()
