"""Runs one shard as a child process and restarts it when it dies."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from caravan_shard.service.starter import PARENT_PID

_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
# After this much running time, the backoff starts again at the first one.
_STABLE_S = 60.0
# The exit code of caravan-shard when it cannot start. Only a first start that fails ends the server: later ones are
# repeated, since what the configuration names, such as an rpc-server, may come back.
_START_EXIT = 2
# Its default drain timeout, the 11 s in which a shard writes what it keeps, and some more.
_KILL_AFTER_S = 45.0
_READ_BYTES = 1 << 16
# What the message of a shard that cannot start begins with.
_ERROR = "caravan-shard: error: "

# Variables of the router that shards must not read, or need not know.
_NOT_OF_SHARDS = ("CARAVAN_CONFIG", "CARAVAN_API_KEY", "CARAVAN_METRICS_KEY")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the programs of shards."""
    return {name: value for name, value in environ.items() if name not in _NOT_OF_SHARDS}


class ReadyPipe:
    """A pipe into which the child writes a byte. Used on the event loop; whoever makes it closes it.

    What was written can be read after the child has ended. A socket's file cannot serve for this: a child that ends
    removes it, and one that lives for a moment is never seen to have it.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._reading, self.descriptor = os.pipe()
        os.set_blocking(self._reading, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether the child has listened. Once it has ended this is final."""
        self._read()
        return self._is_ready

    def hand_over(self) -> None:
        """Close the end that the child has by now, ``descriptor``."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the pipe. `is_ready` stays as it is."""
        self.hand_over()
        self._end_reading()

    def _read(self) -> None:
        if self._reading < 0:
            return
        try:
            data = os.read(self._reading, 1)
        except BlockingIOError:
            return
        self._is_ready = bool(data)
        self._end_reading()

    def _end_reading(self) -> None:
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1


class ShardStartError(Exception):
    """A shard cannot start, and never could before. What it has to say of it is on stderr."""


class ShardProcess:
    """Keeps one shard running until ``stop``."""

    def __init__(self, name: str, socket: Path, flags: Sequence[str], *, reads_errors: bool = False) -> None:
        """``reads_errors``: a start that fails is told with the shard's own message, instead of beside it."""
        self.name = name
        self._reads_errors = reads_errors
        self._problem = ""
        self._socket = socket
        self.address = f"unix:{socket}"
        self._command = [
            *(sys.executable, "-m", "caravan_shard"),
            *("--address", self.address, "--shard-id", name, "--exit-with-parent"),
            *flags,
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        # Of the process that runs, or ran last; None before the first one.
        self._ready: ReadyPipe | None = None
        # Whether the process before that had listened.
        self._could_start = True

    @property
    def listens(self) -> bool:
        """Whether this process has loaded its model and may be spoken to, or could until it ended."""
        return self._ready is not None and self._ready.is_ready

    @property
    def is_starting(self) -> bool:
        """Whether its model is being loaded. Not so after a start that failed: the next one may fail as well."""
        is_alive = self._process is None or self._process.returncode is None
        return is_alive and self._could_start and not self.listens and not self._stopping

    async def run(self) -> None:
        """Start the shard, and restart it with backoff when it dies. Returns after ``stop``.

        Raises ShardStartError if the first process could not start. No end of one that has listened, and of none after
        it, raises anything.
        """
        backoff_s = _FIRST_BACKOFF_S
        first = True
        try:
            while not self._stopping:
                started = time.monotonic()
                code = await self._run_once(is_first=first)
                if self._stopping:
                    return
                if first and code is not None and not self.listens:
                    self._check_start(code)
                first = False
                if time.monotonic() - started > _STABLE_S:
                    backoff_s = _FIRST_BACKOFF_S
                # It has drained if it ends without an error.
                level, what = (logging.INFO, "ended") if code == 0 else (logging.WARNING, "died")
                extra = {"shard": self.name, "exit": _exit_name(code), "in_s": backoff_s}
                _log.log(level, "shard %s, starting it again", what, extra=extra)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)
                # A process that was killed has left it there.
                await asyncio.to_thread(self._socket.unlink, missing_ok=True)
        finally:
            if self._ready is not None:
                self._ready.close()

    async def _run_once(self, *, is_first: bool) -> int | None:
        """Run a process to its end and return its exit code; None if it could not be made.

        Raises ShardStartError if the first one could not be made.
        """
        if self._ready is not None:
            self._could_start = self._ready.is_ready
            self._ready.close()
            self._ready = None
        try:
            process = await self._make_process()
        except OSError as error:
            # Memory, processes or descriptors are short, for which a shard that has served waits.
            if is_first:
                raise ShardStartError(f"{self.name} could not start: {error.strerror}") from error
            _log.warning("a process cannot be started", extra={"shard": self.name, "error": str(error)})
            return None
        self._process = process
        if self._stopping:
            process.send_signal(signal.SIGTERM)
        if process.stderr is not None:
            await self._copy_errors(process.stderr)
        return await process.wait()

    async def _make_process(self) -> asyncio.subprocess.Process:
        """Start the program. Raises OSError."""
        ready = self._ready = ReadyPipe()
        try:
            # In its own session the shard gets no Ctrl-C: the supervisor drains the router first.
            return await asyncio.create_subprocess_exec(
                *(*self._command, "--ready-fd", str(ready.descriptor)),
                pass_fds=(ready.descriptor,),
                start_new_session=True,
                env={**environment(os.environ), PARENT_PID: str(os.getpid())},
                stderr=asyncio.subprocess.PIPE if self._reads_errors else None,
            )
        finally:
            ready.hand_over()

    def _check_start(self, code: int) -> None:
        """Raise ShardStartError if a shard that never listened ended with ``code`` because it could not start."""
        if code == _START_EXIT:
            message = f": {self._problem}" if self._problem else "; its message is above"
            raise ShardStartError(f"{self.name} could not start{message}")
        if code < 0:
            reason = "llama.cpp cannot use the model, or memory is short"
            raise ShardStartError(f"{self.name} ended with {_exit_name(code)} while it loaded its model: {reason}")

    async def _copy_errors(self, stream: asyncio.StreamReader) -> None:
        """Copy what the shard writes to stderr until it ends, and remember its message about a failed start."""
        while chunk := await stream.read(_READ_BYTES):
            sys.stderr.write(text := chunk.decode(errors="replace"))
            if (place := text.rfind(_ERROR)) >= 0:
                self._problem = text[place + len(_ERROR) :].splitlines()[0]

    async def stop(self) -> None:
        """Let the shard drain; kill it if it does not end within ``_KILL_AFTER_S``."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                code = await process.wait()
        except TimeoutError:
            _log.warning("shard did not end in time, killing it", extra={"shard": self.name})
            process.kill()
            code = await process.wait()
        level = logging.INFO if code == 0 else logging.WARNING
        _log.log(level, "shard was stopped", extra={"shard": self.name, "exit": _exit_name(code)})


def _exit_name(code: int | None) -> str:
    """Return the signal's name for a negative exit code, else the code."""
    if code is None:
        return "not started"
    try:
        return signal.Signals(-code).name if code < 0 else str(code)
    except ValueError:  # Python has no names for most real-time signals
        return f"signal {-code}"
