"""Runs one shard as a child process and restarts it when it dies."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
# After this much running time, the backoff starts again at the first one.
_STABLE_S = 60.0
# The exit code of caravan-shard when it cannot start. Only a first start that fails ends the server: later ones are
# repeated, since what the configuration names, such as an rpc-server, may come back.
_START_EXIT = 2
_KILL_AFTER_S = 35.0
_POLL_S = 0.2
_READ_BYTES = 1 << 16
# What the message of a shard that cannot start begins with.
_ERROR = "caravan-shard: error: "


class ShardStartError(Exception):
    """A shard cannot start. What it has to say of it is on stderr."""


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
        # Whether this process has begun to listen, and whether the one before had.
        self._has_listened = False
        self._could_start = True

    @property
    def is_starting(self) -> bool:
        """Whether its model is being loaded. Not so after a start that failed: the next one may fail as well."""
        is_alive = self._process is None or self._process.returncode is None
        return is_alive and self._could_start and not self._has_listened and not self._stopping

    async def run(self) -> None:
        """Start the shard, and restart it with backoff when it dies. Returns after ``stop``; raises ShardStartError."""
        backoff_s = _FIRST_BACKOFF_S
        first = True
        while not self._stopping:
            started = time.monotonic()
            # In its own session the shard gets no Ctrl-C: the supervisor drains the router first.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, start_new_session=True, stderr=asyncio.subprocess.PIPE if self._reads_errors else None
            )
            listening = asyncio.create_task(self._note_listening())
            try:
                if self._process.stderr is not None:
                    await self._copy_errors(self._process.stderr)
                code = await self._process.wait()
            finally:
                listening.cancel()
            if self._stopping:
                return
            if first:
                await self._check_start(code)
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
            self._could_start, self._has_listened = self._has_listened, False

    async def _note_listening(self) -> None:
        while not await asyncio.to_thread(self._socket.exists):  # noqa: ASYNC110  another process makes it
            await asyncio.sleep(_POLL_S)
        self._has_listened = True

    async def _check_start(self, code: int) -> None:
        """Raise ShardStartError if the shard ended with ``code`` because it could not start."""
        if code == _START_EXIT:
            message = f": {self._problem}" if self._problem else "; its message is above"
            raise ShardStartError(f"{self.name} could not start{message}")
        # It listens once its model is loaded. A signal leaves the socket there, any other end removes it.
        if code < 0 and not await asyncio.to_thread(self._socket.exists):
            reason = "llama.cpp cannot use the model, or memory is short"
            raise ShardStartError(f"{self.name} ended with {_exit_name(code)} while it loaded its model: {reason}")

    async def _copy_errors(self, stream: asyncio.StreamReader) -> None:
        """Copy what the shard writes to stderr until it ends, and remember its message about a failed start."""
        while chunk := await stream.read(_READ_BYTES):
            sys.stderr.write(text := chunk.decode(errors="replace"))
            if (place := text.rfind(_ERROR)) >= 0:
                self._problem = text[place + len(_ERROR) :].splitlines()[0]

    @property
    def listens(self) -> bool:
        """Whether the shard has loaded its model and may be spoken to."""
        return self._socket.exists()

    async def stop(self) -> None:
        """Let the shard drain; kill it if it does not end within ``_KILL_AFTER_S``."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_KILL_AFTER_S):
                await process.wait()
        except TimeoutError:
            _log.warning("shard did not end in time, killing it", extra={"shard": self.name})
            process.kill()
            await process.wait()


def _exit_name(code: int) -> str:
    """Return the signal's name for a negative exit code, else the code."""
    return signal.Signals(-code).name if code < 0 else str(code)
