"""Compiles each constraint once, off the event loop, after the check process has survived it."""

import asyncio
import contextlib
import logging
import marshal
import os
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from caravan_proto.messages.constraint import Constraint
from caravan_shard.constraints.check_process import HEAD_BYTES, MAX_CPU_S, frame_size, write_frame
from caravan_shard.constraints.grammar import Grammar, Problem, check_size, make_matcher
from caravan_shard.constraints.tokenizer import ConstraintTokenizer, TokenTable

_log = logging.getLogger(__name__)

# The check gets only the processor time that the forward passes leave, a tenth of a core or less. What takes too much
# of it ends by itself, so this is for a process that hangs.
_MAX_WALL_S = 60.0
# Time for the process to load the vocabulary on a busy machine.
_START_S = 60.0
_MODULE = "caravan_shard.constraints.check_process"

# Outcomes remembered. A grammar takes about 1 MB, at worst some 100 MB (see check_process).
MAX_REMEMBERED = 64
_NICENESS = 10


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
    if process.stdin.is_closing():
        # It ended, which may not be known yet. The transports of uvloop would raise RuntimeError.
        raise BrokenPipeError
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


class ConstraintCompiler:
    """Compiles and remembers constraints. The event loop calls it.

    Sequences keep their grammars. A forgotten constraint is compiled again at the next request for it.
    """

    def __init__(self, tokenizer: ConstraintTokenizer) -> None:
        self._checker = Checker(tokenizer.table)
        self._tokenizer = tokenizer.matching
        self._eog_ids = tuple(tokenizer.table.eog_ids)
        self._outcomes: OrderedDict[Constraint, Grammar | Problem] = OrderedDict()
        self._compiling: dict[Constraint, asyncio.Lock] = {}
        self._pool = ThreadPoolExecutor(1, "constraints", _yield_to_decoding)

    async def compile(self, constraint: Constraint) -> Grammar | Problem:
        """Return the grammar of ``constraint``: the same object for as long as it is remembered.

        Raises CheckUnavailableError.
        """
        problem = check_size(constraint)
        if problem is not None:
            return problem
        known = self._recall(constraint)
        if known is not None:
            return known
        # Others who want this constraint wait for the first, and compile it themselves if the first is cancelled.
        lock = self._compiling.setdefault(constraint, asyncio.Lock())
        async with lock:
            known = self._recall(constraint)
            if known is not None:
                return known
            try:
                outcome = await self._compile(constraint)
            finally:
                self._compiling.pop(constraint, None)
            self._outcomes[constraint] = outcome
            if len(self._outcomes) > MAX_REMEMBERED:
                self._outcomes.popitem(last=False)
        return outcome

    async def compile_all(self, constraints: Iterable[Constraint]) -> dict[Constraint, Grammar] | Problem:
        """Return the grammars of all, or the problem of the first that has one. Raises CheckUnavailableError."""
        grammars = {}
        for constraint in constraints:
            outcome = await self.compile(constraint)
            if isinstance(outcome, Problem):
                return outcome
            grammars[constraint] = outcome
        return grammars

    async def close(self) -> None:
        """End the check process, and the thread after what it compiles, which does not use the model."""
        await self._checker.close()
        self._pool.shutdown(wait=False)

    def _recall(self, constraint: Constraint) -> Grammar | Problem | None:
        outcome = self._outcomes.get(constraint)
        if outcome is not None:
            self._outcomes.move_to_end(constraint)
        return outcome

    async def _compile(self, constraint: Constraint) -> Grammar | Problem:
        problem = await self._checker.check(constraint)
        if problem is not None:
            return problem
        loop = asyncio.get_running_loop()
        matcher = await loop.run_in_executor(self._pool, make_matcher, constraint, self._tokenizer)
        if isinstance(matcher, Problem):
            return matcher
        return Grammar(matcher, self._tokenizer, self._eog_ids)


def _yield_to_decoding() -> None:
    """Lower this thread's priority. Linux has a niceness per thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
