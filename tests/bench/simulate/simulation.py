"""One simulation: a trace, a fleet and a policy of placement."""

import bisect
import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Protocol

from bench.simulate.results import Clients, Report, Targets
from bench.simulate.traces import Trace
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits, Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.measured_times import Points, at_size
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a step = ``decode`` of its decoding sequences + ``prompt`` of its prompt tokens + attention.

    Each is drawn through its points by straight lines, of which the last one continues. Attention takes ``pair_s`` for
    each prompt token and each token of context before it. Copying a cell out of the cache or back takes ``cell_s``.
    """

    decode: Points
    prompt: Points
    pair_s: float = 0.0
    cell_s: float = 6e-6

    def seconds(self, sequences: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of a step."""
        return at_size(self.decode, sequences) + at_size(self.prompt, prompt_tokens) + self.pair_s * pairs

    def slower(self, factor: float) -> "StepTimes":
        """Return the times of a shard that computes ``factor`` times slower. Copies take as long."""
        return StepTimes(
            decode=tuple((size, seconds * factor) for size, seconds in self.decode),
            prompt=tuple((size, seconds * factor) for size, seconds in self.prompt),
            pair_s=self.pair_s * factor,
            cell_s=self.cell_s,
        )


# A model of 8 billion parameters on one GPU, roughly: 25 ms for 32 sequences, 5,000 prompt tokens a second.
LINEAR = StepTimes(decode=((0, 0.020), (32, 0.025)), prompt=((0, 0.0), (1, 0.0002)), pair_s=1e-8)


def recorded(path: Path) -> StepTimes:
    """Read what `bench.shard_steps` recorded with ``--record``."""
    data = json.loads(path.read_text())
    return StepTimes(
        decode=tuple((size, seconds) for size, seconds in data["decode"]),
        prompt=tuple((size, seconds) for size, seconds in data["prompt"]),
        pair_s=data.get("pair_s", 0.0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaler:
    """Wants a shard for every ``requests_per_shard`` that wait or run, between ``least`` and ``most`` shards.

    Without that number, it wants as many as the router says that the load needs. It looks every ``every_s`` seconds. A
    new shard serves after ``starts_s``: a pod is scheduled and a model is read. The fleet shrinks to what it needed at
    most in the last ``stabilization_s``. The defaults of the last are those of a HorizontalPodAutoscaler.
    """

    least: int
    most: int
    requests_per_shard: float | None
    every_s: float = 15.0
    starts_s: float = 90.0
    stabilization_s: float = 300.0

    def wanted(self, requests: int, by_router: float) -> int:
        """Return the number of shards for so many requests, of which the router says that they need ``by_router``."""
        shards = by_router if self.requests_per_shard is None else requests / self.requests_per_shard
        return max(self.least, min(self.most, math.ceil(shards)))


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
        wanted = self._autoscaler.wanted(
            len(self._scheduler.sequences), self._scheduler.wanted.number(self._scheduler.state, now_s)
        )
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


# Places of each shard on the ring.
_VIRTUAL_NODES = 100
# A shard gets at most so many times the mean number of requests.
_LOAD_FACTOR = 1.25


class Policy(Enum):
    """How requests are placed."""

    ROUND_ROBIN = "round robin"
    LEAST_REQUESTS = "least requests"
    PREFIX_HASH = "prefix hash"
    CARAVAN = "Caravan"


class Gateway(Protocol):
    """Chooses a shard for each request."""

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the shard for a prompt that begins so. ``in_flight``: requests that have not ended, of each shard."""


class RoundRobin:
    """Takes the shards in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the next shard."""
        chosen = self._next % len(in_flight)
        self._next = chosen + 1
        return chosen


class LeastRequests:
    """Takes a shard with the fewest requests; of several the one that was chosen longest ago."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the shard with the fewest requests."""
        count = len(in_flight)
        chosen = min(range(count), key=lambda shard: (in_flight[shard], (shard - self._next) % count))
        self._next = chosen + 1
        return chosen


class PrefixHash:
    """Consistent hashing with bounded loads (Mirrokni et al., arXiv 1608.01350), as KubeAI and Envoy do it."""

    def __init__(self, shards: int) -> None:
        points = [
            (_hash(array("q", [shard, node])), shard) for shard in range(shards) for node in range(_VIRTUAL_NODES)
        ]
        self._ring = sorted(points)

    def choose(self, beginning: tuple[int, ...], in_flight: Sequence[int]) -> int:
        """Return the first shard on the ring, from the hash of ``beginning`` on, that has not too many requests."""
        most = math.ceil(_LOAD_FACTOR * (sum(in_flight) + 1) / len(in_flight))
        start = bisect.bisect(self._ring, (_hash(array("q", beginning)), 0))
        ring = (self._ring[(start + place) % len(self._ring)][1] for place in range(len(self._ring)))
        return next(shard for shard in ring if in_flight[shard] < most)


def gateway_of(policy: Policy, shards: int) -> Gateway | None:
    """Return the gateway of ``policy``; None for the router, which needs none."""
    match policy:
        case Policy.ROUND_ROBIN:
            return RoundRobin()
        case Policy.LEAST_REQUESTS:
            return LeastRequests()
        case Policy.PREFIX_HASH:
            return PrefixHash(shards)
        case Policy.CARAVAN:
            return None


def _hash(data: "array[int]") -> int:
    return int.from_bytes(hashlib.blake2b(data.tobytes(), digest_size=8).digest())


# The router lets its scheduler notice the time so often.
_TICK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKind:
    """What a shard computes and holds. ``host_cells``: how many cells fit its host memory."""

    times: StepTimes = LINEAR
    sequences: int = 32
    cells: int = 40_000
    host_cells: int = 0
    batch_tokens: int = 2048

    @property
    def limits(self) -> ShardLimits:
        """What the router hears of it."""
        saving = Saving.ANY if self.host_cells else Saving.NOTHING
        return ShardLimits(
            layout=LayoutLimits(cells=self.cells, cells_per_sequence=self.cells, saving=saving),
            max_sequences=self.sequences,
            max_batch_tokens=self.batch_tokens,
            memory_bytes=self.host_cells,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet, and what its clients expect. Requests of the first ``warm_up_s`` seconds are not measured.

    With an ``autoscaler``, the fleet begins with ``shards``, and more of the kind of the first join: behind the router
    only, since gateways choose among a fixed number.
    """

    shards: tuple[ShardKind, ...]
    autoscaler: Autoscaler | None = None
    targets: Targets = field(default_factory=Targets)
    warm_up_s: float = 10.0
    config: SchedulerConfig = field(default_factory=SchedulerConfig)


def simulate(trace: Trace, setting: Setting, policy: Policy, until_s: float) -> Report:
    """Return what clients saw whose requests arrived before ``until_s``."""
    gateway = gateway_of(policy, len(setting.shards))
    schedulers = [Scheduler(setting.config) for _ in (setting.shards if gateway else range(1))]
    members = [
        Member(PlayedShard(f"shard-{number:03}", kind.times), kind.limits, number if gateway else 0)
        for number, kind in enumerate(setting.shards)
    ]
    clients = Clients(setting.targets, setting.warm_up_s, until_s)
    fleet = Fleet(schedulers, members, clients.hear)
    fleet.begin()
    scaling = None
    if setting.autoscaler is not None:
        assert gateway is None, "gateways choose among a fixed number of shards"
        kind = setting.shards[0]
        scaling = Scaling(setting.autoscaler, fleet, schedulers[0], kind.times, kind.limits)
    in_flight = [0] * len(schedulers)
    chosen: dict[int, int] = {}
    ticked_s = 0.0

    def advance(at_s: float) -> None:
        nonlocal ticked_s
        while ticked_s + _TICK_S <= at_s:
            ticked_s += _TICK_S
            fleet.run_until(ticked_s)
            fleet.tick()
            if scaling is not None:
                scaling.tick(ticked_s)
        fleet.run_until(at_s)
        for request_id in clients.take_ended():
            in_flight[chosen.pop(request_id)] -= 1

    for request_id, arrival in enumerate(trace.arrivals, 1):
        if arrival.at_s >= until_s:
            break
        advance(arrival.at_s)
        index = gateway.choose(arrival.prompt[: trace.hashed_tokens], in_flight) if gateway else 0
        chosen[request_id] = index
        in_flight[index] += 1
        clients.ask(request_id, arrival.at_s)
        asked = request(request_id, arrival.prompt, arrival.output_tokens, ignore_eos=True, arrived_s=arrival.at_s)
        fleet.handle([Submitted(asked)], index)
    advance(until_s)
    while not clients.are_decided(fleet.now_s):
        advance(fleet.now_s + 1.0)
    report = clients.report(fleet.now_s)
    shards = len(setting.shards) if scaling is None else scaling.mean_shards(ticked_s)
    return replace(report, step_cpu_us=1e6 * fleet.cpu_s / max(1, fleet.steps), shards=shards)
