"""Fleets that grow and shrink with their load, as Kubernetes' HorizontalPodAutoscaler and KEDA let them."""

import math
from dataclasses import dataclass

from bench.simulate.step_times import StepTimes
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaler:
    """Wants a shard for every ``requests_per_shard`` that wait or run, between ``least`` and ``most`` shards.

    It looks every ``every_s`` seconds. A new shard serves after ``starts_s``: a pod is scheduled and a model is read.
    The fleet shrinks to what it needed at most in the last ``stabilization_s``. The defaults of the last are those of a
    HorizontalPodAutoscaler.
    """

    least: int
    most: int
    requests_per_shard: float
    every_s: float = 15.0
    starts_s: float = 90.0
    stabilization_s: float = 300.0

    def wanted(self, requests: int) -> int:
        """Return the number of shards for so many requests."""
        return max(self.least, min(self.most, math.ceil(requests / self.requests_per_shard)))


class Scaling:
    """Does what an autoscaler wants with ``fleet``, whose one scheduler is ``scheduler``."""

    def __init__(
        self, autoscaler: Autoscaler, fleet: Fleet, scheduler: Scheduler, times: StepTimes, limits: ShardLimits
    ) -> None:
        self._autoscaler = autoscaler
        self._fleet = fleet
        self._scheduler = scheduler
        self._times = times
        self._limits = limits
        # When each shard that starts is going to serve.
        self._starting_s: list[float] = []
        # What was wanted lately, and when.
        self._wanted: list[tuple[float, int]] = []
        self._draining: set[str] = set()
        self._started = len(fleet.names)
        self._looked_s = 0.0
        self._shard_s = 0.0
        self._noted_s = 0.0

    def tick(self, now_s: float) -> None:
        """Let shards serve that have started, and ask for more or fewer."""
        self._shard_s += self._paid * (now_s - self._noted_s)
        self._noted_s = now_s
        while self._starting_s and self._starting_s[0] <= now_s:
            self._starting_s.pop(0)
            self._started += 1
            self._fleet.join(Member(PlayedShard(f"shard-{self._started:03}", self._times), self._limits, 0))
        if now_s >= self._looked_s + self._autoscaler.every_s:
            self._looked_s = now_s
            self._look(now_s)

    def mean_shards(self, until_s: float) -> float:
        """Return how many shards there were on average, those that start and drain included."""
        return self._shard_s / until_s

    @property
    def _paid(self) -> int:
        return len(self._fleet.names) + len(self._starting_s)

    def _look(self, now_s: float) -> None:
        wanted = self._autoscaler.wanted(len(self._scheduler.sequences))
        self._wanted = [one for one in self._wanted if one[0] > now_s - self._autoscaler.stabilization_s]
        self._wanted.append((now_s, wanted))
        self._draining &= set(self._fleet.names)
        serving = [name for name in self._fleet.names if name not in self._draining]
        there = len(serving) + len(self._starting_s)
        self._starting_s += [now_s + self._autoscaler.starts_s] * (wanted - there)
        most_wanted = max(count for _, count in self._wanted)
        # A StatefulSet gives up its newest pods first.
        for name in serving[len(serving) - max(0, there - most_wanted) :]:
            self._draining.add(name)
            self._fleet.drain(name)
