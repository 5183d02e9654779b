"""Repeats measurements that other work on the machine has disturbed."""

import os
import resource
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from bench.machine import busy_seconds, wait_idle
from caravan_router.bench.cpu_time import cpu_seconds

_DISTURBED_SHARE = 0.04
_ATTEMPTS = 3

T = TypeVar("T")


def least_disturbed(measure: Callable[[int], T], *, server: Iterable[int], idle_limit_s: float) -> tuple[T, float]:
    """Call ``measure(attempt)`` up to three times, until other processes take little CPU time meanwhile.

    Return the least disturbed result and the share of the CPU that others took. ``server`` are the processes that do
    not count as others, beside this process's own children.
    """
    found: list[tuple[float, T]] = []
    for attempt in range(_ATTEMPTS):
        wait_idle(idle_limit_s)
        watch = _OthersWatch(tuple(server))
        result = measure(attempt)
        found.append((watch.share(), result))
        if found[-1][0] <= _DISTURBED_SHARE:
            break
    share, result = min(found, key=lambda pair: pair[0])
    return result, share


def remark(share: float) -> str:
    """Return a remark for the end of a line, empty if the measurement was not disturbed."""
    return f" (disturbed: {share:.0%} of the CPU went to others)" if share > _DISTURBED_SHARE else ""


class _OthersWatch:
    """Measures, from its creation on, the share of the CPU that neither the server nor our own children used."""

    def __init__(self, server: tuple[int, ...]) -> None:
        self._server = server
        self._wall = time.monotonic()
        self._ours = self._our_seconds()
        self._busy = busy_seconds()

    def share(self) -> float:
        others = busy_seconds() - self._busy - (self._our_seconds() - self._ours)
        return max(0.0, others) / (time.monotonic() - self._wall) / (os.cpu_count() or 1)

    def _our_seconds(self) -> float:
        ended_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cpu_seconds(self._server) + ended_children.ru_utime + ended_children.ru_stime
