"""How long what comes waits for servers that others keep busy."""

import math
from collections.abc import Callable

# What waits should be done in so many seconds, beside what comes.
BACKLOG_S = 30.0
# The mean wait is the time that there is for it divided by this: one in a hundred waits longer.
_TAIL = 4.6
_BISECTIONS = 24


def seldom_waits(target_s: float, service_s: float, differs: float, *, rate: float, servers: float) -> bool:
    """Whether few wait so long that waiting and being served take longer than ``target_s``, or twice what they must.

    The mean wait in a queue with several servers, by Sakasegawa (1977), for service times with a mean of ``service_s``
    that differ: ``differs`` is half of the mean square, divided by the square of the mean. ``rate``: arrivals a second.
    """
    servers = max(1.0, servers)
    busy = rate * service_s / servers
    if busy >= 1:
        return False
    wait_s = differs * service_s * math.pow(busy, math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - busy))
    return wait_s * _TAIL <= max(target_s - service_s, service_s)


def last_that_suits(good: float, bad: float, suits: Callable[[float], bool]) -> float:
    """Return the number nearest to ``bad`` that ``suits``, as all from ``good`` up to it do; ``bad`` if that does."""
    if suits(bad):
        return bad
    for _ in range(_BISECTIONS):
        middle = (good + bad) / 2
        good, bad = (middle, bad) if suits(middle) else (good, middle)
    return good
