"""The simulations of docs/simulator.md: each trace at several loads, under each policy, with the same seed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.simulate.results import Report
from bench.simulate.simulation import LINEAR, Autoscaler, Policy, Setting, ShardKind, simulate
from bench.simulate.traces import TRACES, Load
from caravan_scheduler.config import SchedulerConfig

SECONDS = 30.0
SEED = 1
SHARDS = 20
SLOW_FACTOR = 3.0
FAST = ShardKind()
SLOW = ShardKind(times=LINEAR.slower(SLOW_FACTOR))
TIERED = ShardKind(host_cells=100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A trace at several ``rates``, in requests per second. The document shows latencies at the rate ``shown``."""

    name: str
    trace: str
    rates: tuple[float, ...]
    shown: float
    shards: tuple[ShardKind, ...] = (FAST,) * SHARDS


SCENARIOS = (
    Scenario(name="unrelated prompts", trace="poisson", rates=(100, 120), shown=100),
    Scenario(name="bursts of 40", trace="bursts", rates=(80, 100), shown=100),
    Scenario(name="mixed lengths", trace="mixed-lengths", rates=(40, 60), shown=60),
    Scenario(name="shared prefixes", trace="shared-prefixes", rates=(40, 60, 100, 140), shown=100),
    Scenario(
        name="shared prefixes, host memory",
        trace="shared-prefixes",
        rates=(100, 140),
        shown=100,
        shards=(TIERED,) * SHARDS,
    ),
    Scenario(name="conversations", trace="conversations", rates=(150, 200), shown=150),
    Scenario(
        name="unrelated prompts, half of the shards slow",
        trace="poisson",
        rates=(60, 70, 80),
        shown=70,
        shards=(FAST, SLOW) * (SHARDS // 2),
    ),
    Scenario(
        name="shared prefixes, half of the shards slow",
        trace="shared-prefixes",
        rates=(60, 80),
        shown=60,
        shards=(FAST, SLOW) * (SHARDS // 2),
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of a scenario."""

    scenario: Scenario
    rate: float
    policy: Policy

    def report(self) -> Report:
        """Simulate."""
        trace = TRACES[self.scenario.trace](Load(per_second=self.rate, seconds=SECONDS, seed=SEED))
        return simulate(trace, Setting(shards=self.scenario.shards), self.policy, SECONDS)


def runs(scenarios: Iterable[Scenario] = SCENARIOS) -> Iterator[Run]:
    """Yield the simulations of ``scenarios``."""
    for scenario in scenarios:
        for rate in scenario.rates:
            for policy in Policy:
                yield Run(scenario, rate, policy)


def best_alone(kind: ShardKind, trace: str) -> float:
    """Return the best goodput of one shard, in good requests per second, over loads that grow by a tenth."""
    setting, seconds = Setting(shards=(kind,)), 4 * SECONDS
    best, rate = 0.0, 0.5
    while True:
        made = TRACES[trace](Load(per_second=rate, seconds=seconds, seed=SEED))
        goodput = simulate(made, setting, Policy.CARAVAN, seconds).goodput
        best = max(best, goodput)
        if goodput < best / 2:
            return best
        rate *= 1.1


_HOST_SECONDS = 60.0
_DAY_SECONDS = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """A load that one fleet serves. ``shown``: what the row of its table says of the fleet."""

    table: str
    shown: tuple[str, ...]
    trace: str
    load: Load
    setting: Setting

    def report(self) -> Report:
        """Simulate."""
        return simulate(TRACES[self.trace](self.load), self.setting, Policy.CARAVAN, self.load.seconds)


def _host() -> Iterator[Sizing]:
    """One host with four GPUs: mixed prompts at growing rates, then other numbers of cells and sequences."""
    kinds = [(rate, FAST) for rate in (6, 8, 10, 12, 14)]
    kinds += [(10, ShardKind(sequences=32, cells=cells)) for cells in (10_000, 20_000, 80_000)]
    kinds += [(10, ShardKind(sequences=sequences, cells=40_000)) for sequences in (8, 16, 64)]
    for rate, kind in kinds:
        yield Sizing(
            table="host",
            shown=(f"{rate}", f"{kind.cells:,}", f"{kind.sequences}"),
            trace="mixed-lengths",
            load=Load(per_second=rate, seconds=_HOST_SECONDS, seed=SEED),
            setting=Setting(shards=(kind,) * 4),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Day:
    """A load that rises tenfold to ``rate`` and falls again within twenty minutes, for up to ``most`` shards."""

    trace: str
    rate: float
    most: int

    def fixed(self, shards: int) -> Sizing:
        return self._sizing(f"fixed: {shards}", Setting(shards=(FAST,) * shards))

    def scaled(self, requests_per_shard: float | None, starts_s: float = 90.0) -> Sizing:
        scaler = Autoscaler(least=2, most=self.most, requests_per_shard=requests_per_shard, starts_s=starts_s)
        rule = "what the router wants" if requests_per_shard is None else f"one for {requests_per_shard} requests"
        config = SchedulerConfig(shard_start_s=starts_s + scaler.every_s)
        setting = Setting(shards=(FAST,) * scaler.least, autoscaler=scaler, config=config)
        return self._sizing(f"2 to {self.most}: {rule}, {starts_s:.0f} s to start", setting)

    def _sizing(self, name: str, setting: Setting) -> Sizing:
        load = Load(per_second=self.rate, seconds=_DAY_SECONDS, seed=SEED)
        return Sizing(table=self.trace, shown=(name,), trace=self.trace, load=load, setting=setting)


def _days() -> Iterator[Sizing]:
    """Hosts that come and go with the load."""
    day = _Day(trace="day", rate=80.0, most=20)
    yield from (day.fixed(20), day.fixed(16))
    yield from (day.scaled(24), day.scaled(12), day.scaled(8), day.scaled(8, 20.0), day.scaled(None))
    mixed = _Day(trace="mixed-day", rate=30.0, most=16)
    yield from (mixed.scaled(12), mixed.scaled(None))


SIZINGS = (*_host(), *_days())
