"""What starting on a shard costs a request, and how long it would wait for one, in seconds by what was measured."""

import bisect
import math
from collections import Counter

from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.prompts_under_way import PromptsUnderWay
from caravan_scheduler.planning.shard_queues import ShardQueues
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.clock import Clock
from caravan_scheduler.shard.ledger import ShardLedger

# The cost of sharing a shard with one more sequence, in prompt tokens that could be computed in that time.
_TOKENS_PER_RESIDENT = 64
# How far what is known of a shard's speed follows each look at it: a disturbed step must not turn requests away.
_NEWEST_SPEED = 0.05
# A second of waiting for an emptier shard counts so much: it is certain, while the residents of a fuller one may end.
_WAIT_WEIGHT = 4.0
# Most shards whose step ends soon that are considered.
_MOST_SOON_FREE = 4
# The seconds of a prompt token before any was measured.
_FIRST_TOKEN_S = 1e-3


class Speeds:
    """The speeds of shards, and when their steps end."""

    def __init__(self, clock: Clock, lengths: OutputLengths, prompts: PromptsUnderWay, queues: ShardQueues) -> None:
        self._clock = clock
        self._lengths = lengths
        self._prompts = prompts
        self._queues = queues
        # Measured seconds of a prompt token, by shard.
        self._token_s: dict[str, float] = {}
        # Shards that can take a request after the step under way: the weighted time at which that ends plus the cost of
        # sharing them, in seconds, and their names; ascending. The same by name.
        self._soon_free: list[tuple[float, str, ShardLedger]] = []
        self._soon_costs: dict[str, float] = {}
        # How many requests of this plan wait for a shard whose step ends soon, by its name.
        self.expected: Counter[str] = Counter()

    def update(self, shard: ShardLedger, *, soon_free: bool) -> None:
        """Measure ``shard``, which changed. ``soon_free``: it can take a request after the step under way."""
        self._forget_soon_free(shard.name)
        if (token_s := shard.costs.prompt_token_s) > 0:
            known_s = self.token_s(shard) if self._token_s else token_s
            self._token_s[shard.name] = known_s + _NEWEST_SPEED * (token_s - known_s)
        if soon_free:
            cost_s = self._soon_costs[shard.name] = _WAIT_WEIGHT * shard.commands.busy_until_s + self.sharing_s(shard)
            bisect.insort(self._soon_free, (cost_s, shard.name, shard))

    def forget(self, shard: str) -> None:
        """Forget ``shard``, which is gone."""
        self._token_s.pop(shard, None)
        self._forget_soon_free(shard)

    def _forget_soon_free(self, shard: str) -> None:
        if (cost_s := self._soon_costs.pop(shard, None)) is not None:
            del self._soon_free[bisect.bisect_left(self._soon_free, (cost_s, shard))]

    def token_s(self, shard: ShardAccount) -> float:
        """Return the measured seconds of a prompt token. A shard that has computed none is taken for the fastest."""
        return self._token_s.get(shard.name) or min(self._token_s.values(), default=_FIRST_TOKEN_S)

    def sharing_s(self, shard: ShardAccount, more: int = 0) -> float:
        """Return what sharing ``shard`` with its residents, and ``more`` sequences, costs a request."""
        return self.token_s(shard) * _TOKENS_PER_RESIDENT * (len(shard.stays.residents) + more)

    def start_s(self, shard: ShardAccount, tokens: int) -> float:
        """Return what starting on ``shard`` costs a request, of which ``tokens`` have to be computed there."""
        return self.token_s(shard) * tokens + self.sharing_s(shard)

    def soon_better(self, than: ShardAccount) -> ShardLedger | None:
        """Return a shard whose step ends so soon, and that is so much emptier than ``than``, that it costs less.

        Requests that wait for it already count as its residents. On ``than``, prompts are to be computed first.
        """
        limit_s = self.sharing_s(than) + self.token_s(than) * self._prompts.pending_tokens(than.name)
        for _, name, shard in self._soon_free[:_MOST_SOON_FREE]:
            if _WAIT_WEIGHT * self._step_left_s(shard) + self.sharing_s(shard, self.expected.get(name, 0)) < limit_s:
                return shard
        return None

    def wait_s(self, shard: ShardAccount) -> float:
        """Return in how many seconds ``shard``, which is busy or full, can start one more; infinite if unknown."""
        if shard.drain.has_begun:
            return math.inf
        step_s, ahead = self._step_left_s(shard), self._queues.length(shard.name) - shard.stays.free_sequences
        if ahead < 0:
            return step_s
        slot_s = self._lengths.mean * shard.costs.mean_step_s / max(1, len(shard.stays.residents))
        return max(step_s, slot_s * (ahead + 1)) if slot_s > 0 else math.inf

    def _step_left_s(self, shard: ShardAccount) -> float:
        """Return how many more seconds the step of ``shard`` takes; 0 if none is under way."""
        now_s, end_s = self._clock.now_s, shard.commands.busy_until_s
        if not math.isfinite(end_s):
            return 0.0
        # A step that is late is expected to take as long again as it is late already.
        return end_s - now_s if now_s < end_s else now_s - end_s
