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
# The exit code of caravan-shard when it cannot start with its configuration. Only a first start ends the server by it:
# later ones are repeated, since what the configuration names, such as an rpc-server, may come back.
_USAGE_EXIT = 2
_KILL_AFTER_S = 35.0


class ShardStartError(Exception):
    """A shard cannot start with its configuration; its own message is on stderr."""


class ShardProcess:
    """Keeps one shard running until ``stop``."""

    def __init__(self, name: str, socket: Path, flags: Sequence[str]) -> None:
        self.name = name
        self.address = f"unix:{socket}"
        self._command = [
            *(sys.executable, "-m", "caravan_shard"),
            *("--address", self.address, "--shard-id", name, "--exit-with-parent"),
            *flags,
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    async def run(self) -> None:
        """Start the shard, and restart it with backoff when it dies. Returns after ``stop``; raises ShardStartError."""
        backoff_s = _FIRST_BACKOFF_S
        first = True
        while not self._stopping:
            started = time.monotonic()
            # In its own session the shard gets no Ctrl-C: the supervisor drains the router first.
            self._process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
            code = await self._process.wait()
            if self._stopping:
                return
            if code == _USAGE_EXIT and first:
                raise ShardStartError(self.name)
            first = False
            if time.monotonic() - started > _STABLE_S:
                backoff_s = _FIRST_BACKOFF_S
            # It has drained if it ends without an error.
            level, what = (logging.INFO, "ended") if code == 0 else (logging.WARNING, "died")
            extra = {"shard": self.name, "exit": _exit_name(code), "in_s": backoff_s}
            _log.log(level, "shard %s, starting it again", what, extra=extra)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

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
