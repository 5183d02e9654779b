"""One simulation: a trace, a fleet and a policy of placement."""

from dataclasses import dataclass, field, replace

from bench.simulate.autoscaling import Autoscaler, Scaling
from bench.simulate.gateways import Policy, gateway_of
from bench.simulate.results import Clients, Report, Targets
from bench.simulate.step_times import LINEAR, StepTimes
from bench.simulate.traces import Trace
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits, Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request

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
