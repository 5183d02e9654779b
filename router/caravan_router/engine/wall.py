"""Keeps a bug where it shows: it is logged, and the rest of the router serves on."""

import asyncio
import functools
import logging
import traceback
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

from caravan_router.engine.observer import EngineObserver
from caravan_scheduler.actions import Action, Faulted

_log = logging.getLogger(__name__)

# Work that has a bug begins again after this many seconds.
_PAUSE_S = 1.0
# So many calls of a scheduler in a row, each of which meets a bug that it must begin anew for, are no accident.
_HOPELESS = 20


async def lasting(work: Callable[[], Awaitable[None]], what: str, pause_s: float = _PAUSE_S) -> None:
    """Do ``work`` until it returns or is cancelled, again and again if a bug ends it. ``what`` it is, for the log."""
    while True:
        try:
            return await work()
        except Exception:  # noqa: BLE001  whatever a bug raises
            log_bug(f"{what} has met a bug and begins again")
        await asyncio.sleep(pause_s)


def log_bug(message: str, **extra: object) -> None:
    """Log the exception that is handled now."""
    _log.exception(message, extra=extra)


class FaultLog:
    """Logs the bugs of one model's scheduler, each with its place once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._known: set[str] = set()
        # Calls in a row in which the scheduler began anew.
        self._begun_anew = 0

    def check(self, actions: Iterable[Action]) -> None:
        """Raise the bug of a scheduler that has to begin anew at every call, and serves nothing."""
        faults = [one for one in actions if isinstance(one, Faulted) and one.is_rebuilt]
        self._begun_anew = self._begun_anew + 1 if faults else 0
        if self._begun_anew >= _HOPELESS:
            self._begun_anew = 0
            raise faults[-1].error

    def log(self, error: Exception, **extra: object) -> None:
        """Log one. ``extra``: what it has led to."""
        known = repr((type(error), traceback.extract_tb(error.__traceback__)[-1:]))
        place = None if known in self._known else error
        _log.error("an unexpected exception: %r", error, exc_info=place, extra={"model": self._model, **extra})
        self._known.add(known)


class _Guarded:
    """An observer whose methods raise nothing. Each bug is logged once."""

    def __init__(self, observer: EngineObserver) -> None:
        self._observer = observer
        self._logged: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._observer, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                method(*args, **kwargs)
            except Exception:  # noqa: BLE001  whatever a bug raises
                if name not in self._logged:
                    self._logged.add(name)
                    log_bug("what happens is not counted as it should be", method=name)

        setattr(self, name, call)  # looked up once
        return call


def guarded(observer: EngineObserver) -> EngineObserver:
    """Return an observer that tells ``observer``, and raises nothing that it raises."""
    return cast("EngineObserver", _Guarded(observer))
