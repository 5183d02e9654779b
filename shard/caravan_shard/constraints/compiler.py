"""Compiles each constraint once, off the event loop, after the check process has survived it."""

import asyncio
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from caravan_proto.messages.constraint import Constraint
from caravan_shard.constraints.checker import Checker
from caravan_shard.constraints.grammar import Grammar, check_size, make_matcher
from caravan_shard.constraints.problem import Problem
from caravan_shard.constraints.tokenizer import ConstraintTokenizer

# Outcomes remembered. A grammar takes about 1 MB, at worst some 100 MB (see check_process).
MAX_REMEMBERED = 64
_NICENESS = 10


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
