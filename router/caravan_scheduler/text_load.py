"""The texts that a model which only embeds gets: how many come, what they take of a shard, and what they wait for."""

from collections.abc import Iterator
from contextlib import contextmanager

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.load import Arrivals, Mean
from caravan_scheduler.queueing import BACKLOG_S, last_that_suits, seldom_waits

# However many shards there are, so many times as many are enough.
_MOST_TIMES = 8.0
# Shards should be busy for no larger part of the time: the rate and what a call takes are only estimated.
_MOST_BUSY = 0.95


class TextLoad:
    """Calls with texts, from their arrival on. Bulk work does not count, except for what a token takes.

    ``waiting``: tokens of the calls that wait. ``calls``: how many calls wait or are under way, bulk work included.
    """

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.waiting = 0
        self.calls = 0
        self._tokens = Mean()
        self._tokens_squared = Mean()
        # What was measured when a call ended: how long its shard was busy since the last one ended there, and tokens.
        self._busy_s = Mean()
        self._computed = Mean()
        # By shard, how many calls are under way there, and since when its time is not counted.
        self._under_way: dict[object, tuple[int, float]] = {}

    @property
    def token_s(self) -> float:
        """What a token takes of the time of a shard, in seconds; 0 before the first."""
        return self._busy_s.value / self._computed.value if self._computed.value else 0.0

    def note_call(self, tokens: int, now_s: float) -> None:
        """Count a call of ``tokens`` that has come."""
        self.arrivals.note(now_s)
        self._tokens.add(tokens)
        self._tokens_squared.add(tokens**2)

    @contextmanager
    def wait_of(self, tokens: int) -> Iterator[None]:
        """Count ``tokens`` as waiting for the block."""
        self.waiting += tokens
        try:
            yield
        finally:
            self.waiting -= tokens

    def begin(self, shard: object, now_s: float) -> None:
        """Note that ``shard`` gets a call."""
        count, since_s = self._under_way.get(shard, (0, now_s))
        self._under_way[shard] = count + 1, since_s

    def end(self, shard: object, tokens: int, now_s: float) -> None:
        """Note that a call of ``shard`` has ended; 0 ``tokens`` if it failed."""
        count, since_s = self._under_way.pop(shard)
        if count > 1:
            self._under_way[shard] = count - 1, now_s
        if tokens:
            self._busy_s.add(now_s - since_s)
            self._computed.add(tokens)

    def needed(self, config: SchedulerConfig, now_s: float) -> float:
        """Return how many shards what is expected and what waits need.

        By Little's law, calls that come at a rate keep rate x seconds of a call busy. More shards let them seldom wait
        longer than they should.
        """
        call_s = self.token_s * self._tokens.value
        if not call_s:
            return 0.0
        # Nothing that runs is a lower bound here, so chance is not taken off.
        rate = max(self.arrivals.seen(now_s), self.arrivals.expected(now_s, config.shard_start_s))
        differs = self._tokens_squared.value / (2 * self._tokens.value**2)

        def suits(shards: float) -> bool:
            return seldom_waits(config.target_ttft_s, call_s, differs, rate=rate, servers=shards)

        busy = rate * call_s / _MOST_BUSY
        return last_that_suits(_MOST_TIMES * max(1.0, busy), busy, suits) + self.waiting * self.token_s / BACKLOG_S
