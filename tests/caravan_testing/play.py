"""A scheduler and a shard that only keeps time, in virtual time."""

from typing import Any

from caravan_scheduler.actions import Action, Deliver, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.ledgers import limits_of
from caravan_testing.requests import request

_LIMITS = limits_of(cells=4000, cells_per_sequence=4000, max_sequences=8, max_batch_tokens=512)


class SlowPrompts:
    """A step takes 20 ms, and 10 ms for each token of a prompt."""

    cell_s = 1e-6

    def seconds(self, sequences: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of a step."""
        return 0.02 + 0.01 * prompt_tokens


class Play:
    """By request id, ``asked_s`` and ``started_s``: when it came and started, and ``tokens_s``: when each token came.

    ``cached``: how many tokens it found.
    """

    def __init__(self) -> None:
        self.scheduler = Scheduler(SchedulerConfig())
        self.asked_s: dict[int, float] = {}
        self.started_s: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.tokens_s: dict[int, list[float]] = {}
        self.fleet = Fleet([self.scheduler], [Member(PlayedShard("a", SlowPrompts()), _LIMITS, 0)], self._hear)
        self.fleet.begin()

    def _hear(self, now_s: float, action: Action) -> None:
        if isinstance(action, Start):
            self.started_s[action.request_id] = now_s
            self.cached[action.request_id] = action.cached_tokens
        elif isinstance(action, Deliver):
            self.tokens_s.setdefault(action.request_id, []).extend(now_s for _ in action.tokens)

    @property
    def shard(self) -> ShardAccount:
        """The account of the shard."""
        return self.scheduler.shards["a"]

    def ask(self, request_id: int, prompt: tuple[int, ...], *, output: int = 10, **fields: Any) -> None:
        """Submit a request with more ``fields`` of `request`."""
        self.asked_s[request_id] = self.fleet.now_s
        asked = request(request_id, prompt, output, ignore_eos=True, arrived_s=self.fleet.now_s, **fields)
        self.fleet.handle([Submitted(asked)])

    def pass_s(self, seconds: float) -> None:
        """Let time pass as the router does, which ticks four times a second."""
        until_s = self.fleet.now_s + seconds
        while self.fleet.now_s < until_s:
            self.fleet.run_until(min(until_s, self.fleet.now_s + 0.25))
            self.fleet.tick()

    def until_idle(self) -> None:
        """Let time pass until all requests have ended."""
        while self.scheduler.sequences:
            self.pass_s(0.25)
