"""Starts the check process, sends it constraints, and explains its death."""

import asyncio
import contextlib
import logging
import marshal
import signal
import sys
from typing import Any

from caravan_proto.messages.constraint import Constraint
from caravan_shard.constraints.check_process import HEAD_BYTES, MAX_CPU_S, frame_size, write_frame
from caravan_shard.constraints.problem import Problem
from caravan_shard.constraints.tokenizer import TokenTable

_log = logging.getLogger(__name__)

# The check gets only the processor time that the forward passes leave.
_MAX_WALL_S = 10.0
# Time for the process to load the vocabulary on a busy machine.
_START_S = 60.0
_MODULE = "caravan_shard.constraints.check_process"


class CheckUnavailableError(Exception):
    """The check process failed, and not because of the constraint."""


class Checker:
    """Checks constraints one at a time, in a process that it starts when the first one comes."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def check(self, constraint: Constraint) -> Problem | None:
        """Return why the constraint cannot be compiled, None if it can.

        Raises CheckUnavailableError if two processes fail, and not because of the constraint.
        """
        async with self._turn:
            try:
                return await self._check(constraint)
            except CheckUnavailableError as error:
                _log.warning("a constraint is checked again", extra={"reason": str(error)})
            return await self._check(constraint)

    async def _check(self, constraint: Constraint) -> Problem | None:
        name = constraint.kind.value
        try:
            process = await asyncio.wait_for(self._ready(), _START_S)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.close()
            raise CheckUnavailableError(f"cannot start the check of constraints: {error!r}") from error
        except asyncio.CancelledError:
            await self.close()
            raise
        finished = False
        try:
            sentence = await asyncio.wait_for(_send(process, (name, constraint.source)), _MAX_WALL_S)
            finished = True
        except TimeoutError as error:
            # It has not used up its processor time: it is stopped, or gets none.
            raise CheckUnavailableError(f"the check of constraints did not answer in {_MAX_WALL_S:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            return await _autopsy(process, name, error)
        finally:
            if not finished:
                await self.close()
        return Problem(sentence) if sentence else None

    async def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            # Shielded from cancellation: a killed process that nobody waits for becomes a zombie.
            await asyncio.shield(process.wait())

    async def _ready(self) -> asyncio.subprocess.Process:
        process = self._process
        if process is None:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                _MODULE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,  # llguidance's panics
                start_new_session=True,  # Ctrl-C is for the shard, which then ends this process
            )
            await _send(process, (self._table.tokens, self._table.eog_ids))
        return process


async def _send(process: asyncio.subprocess.Process, value: Any) -> str:
    """Send ``value`` and return the answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(write_frame(value))
    await process.stdin.drain()
    size = frame_size(await process.stdout.readexactly(HEAD_BYTES))
    return str(marshal.loads(await process.stdout.readexactly(size)))  # noqa: S302  our own process wrote it


async def _autopsy(process: asyncio.subprocess.Process, name: str, error: Exception) -> Problem:
    code = await process.wait()
    _log.warning("a constraint ended the process that checks it", extra={"code": code})
    if code == -signal.SIGPROF:
        return Problem(f"{name} takes more than {MAX_CPU_S:g} s to compile")
    if code in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        return Problem(f"{name} is nested too deeply or takes too much memory to compile")
    raise CheckUnavailableError(f"the check of constraints ended with code {code}") from error
