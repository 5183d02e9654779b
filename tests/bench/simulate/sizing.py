"""The simulations of docs/sizing.md: how many shards, cells and sequences two loads need."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.simulate.autoscaling import Autoscaler
from bench.simulate.gateways import Policy
from bench.simulate.results import Report
from bench.simulate.scenarios import FAST, SEED
from bench.simulate.simulation import Setting, ShardKind, simulate
from bench.simulate.traces import TRACES, Load

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
