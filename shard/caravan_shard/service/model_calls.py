"""Calls that use the model on threads of their own, each answered or refused, also while the shard ends."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from caravan_shard.backends.base import ModelUsers
from caravan_shard.engine.worker import ENDING
from caravan_shard.protocol.results import Refusal

P = ParamSpec("P")
R = TypeVar("R")


class ModelCalls:
    """Runs on the event loop. After `refuse`, what has begun is answered, and all else gets ENDING at once."""

    def __init__(self, users: ModelUsers) -> None:
        self._users = users
        # Those that have not ended. Those that have begun cannot be cancelled.
        self._on_threads: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def refusal(self) -> Refusal | None:
        """Why a call cannot begin now; None if it can."""
        return ENDING if self._users.are_refused else None

    async def run(self, threads: Executor, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | Refusal:
        """Return what ``work`` returns, which one of ``threads`` calls while the model stays."""
        if self.refusal is not None:
            return self.refusal

        def call() -> R | Refusal:
            with self._users.using() as may_use:
                return work(*args, **kwargs) if may_use else ENDING

        called = threads.submit(call)
        self._on_threads.add(called)
        try:
            return await asyncio.wrap_future(called)
        except asyncio.CancelledError:
            if self._is_wanted():
                return ENDING
            raise
        finally:
            self._on_threads.discard(called)

    async def unless_ending(self, work: Coroutine[Any, Any, R]) -> R | Refusal:
        """Return what ``work`` returns, which is cancelled if it has not ended when calls are refused."""
        if self.refusal is not None:
            work.close()
            return self.refusal
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_wanted():
                return ENDING
            raise
        finally:
            self._tasks.discard(task)

    def refuse(self) -> None:
        """Refuse calls that have not begun, and those to come."""
        self._users.refuse()
        for called in self._on_threads:
            called.cancel()
        for task in self._tasks:
            task.cancel()

    def _is_wanted(self) -> bool:
        """Whether `refuse` has cancelled what this task waited for, and nobody the task itself."""
        task = asyncio.current_task()
        return self._users.are_refused and task is not None and not task.cancelling()
