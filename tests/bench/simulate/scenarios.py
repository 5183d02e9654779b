"""The simulations of docs/simulator.md: each trace at several loads, under each policy, with the same seed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bench.simulate.results import Report
from bench.simulate.simulation import LINEAR, Autoscaler, Policy, Setting, ShardKind, simulate
from bench.simulate.traces import TRACES, Load

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
_DAY_RATE = 80.0
_DAY_SHARDS = 20


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


def _day() -> Iterator[Sizing]:
    """Up to twenty hosts and a load that rises tenfold and falls again within twenty minutes."""
    fixed = {f"fixed: {shards}": (shards, None) for shards in (_DAY_SHARDS, 16)}
    scaled = {
        f"2 to {_DAY_SHARDS}: one for {requests} requests, {starts_s:.0f} s to start": (
            2,
            Autoscaler(least=2, most=_DAY_SHARDS, requests_per_shard=requests, starts_s=starts_s),
        )
        for requests, starts_s in ((24, 90.0), (12, 90.0), (8, 90.0), (8, 20.0))
    }
    for name, (shards, autoscaler) in {**fixed, **scaled}.items():
        yield Sizing(
            table="day",
            shown=(name,),
            trace="day",
            load=Load(per_second=_DAY_RATE, seconds=_DAY_SECONDS, seed=SEED),
            setting=Setting(shards=(FAST,) * shards, autoscaler=autoscaler),
        )


SIZINGS = (*_host(), *_day())
