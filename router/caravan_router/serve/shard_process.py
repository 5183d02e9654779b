"""One shard as a child process: started, watched, started again with backoff when it dies."""

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
# A shard that ran this long was well: the next death starts from the first backoff.
_WELL_S = 60.0
# What caravan-shard exits with when it cannot start as asked; trying again would end the same.
_USAGE_EXIT = 2
_KILL_AFTER_S = 35.0


class ShardStartError(Exception):
    """The shard said that it cannot start as asked; its own message is on stderr."""


class ShardProcess:
    """Keeps one shard running until told to stop."""

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
        """Start and restart. Returns after ``stop``; raises ShardStartError."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopping:
            started = time.monotonic()
            # A session of its own: Ctrl-C reaches the supervisor alone, which drains the router first.
            self._process = await asyncio.create_subprocess_exec(*self._command, start_new_session=True)
            code = await self._process.wait()
            if self._stopping:
                return
            if code == _USAGE_EXIT:
                raise ShardStartError(self.name)
            if time.monotonic() - started > _WELL_S:
                backoff_s = _FIRST_BACKOFF_S
            _log.warning(
                "shard died, starting it again",
                extra={"shard": self.name, "exit": _exit_name(code), "in_s": backoff_s},
            )
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _MAX_BACKOFF_S)

    async def stop(self) -> None:
        """Let it drain; kill it if it does not end."""
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
    """``-9`` reads SIGKILL."""
    return signal.Signals(-code).name if code < 0 else str(code)
