"""A batch beside other requests, in virtual time: what it costs them, and how much of it is done."""

import random
from dataclasses import dataclass

from bench.simulate.results import percentile
from bench.simulate.simulation import Setting
from bench.simulate.traces import Trace
from caravan_scheduler.actions import Action, Deliver, Fail, Preempt, Start
from caravan_scheduler.core.generation import BULK_PRIORITY, Tenant
from caravan_scheduler.events import Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request

OTHERS = Tenant(name="others")
BATCH = Tenant(name="batch")
# Ids of the lines begin here.
_FIRST_LINE = 1_000_000
# The router lets its scheduler notice the time so often.
_TICK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkReport:
    """What the others saw of a batch of so many ``lines``. Times are in seconds.

    ``cached``: the share of their prompt tokens that was. ``lines_per_s``: how many lines ended a second, ``paused``:
    how many pauses cost one its cells.
    """

    lines: int
    others: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    cached: float
    lines_per_s: float
    paused: int


class _Clients:
    """Notes what the scheduler says of each request."""

    def __init__(self) -> None:
        self.first_s: dict[int, float] = {}
        self.started: dict[int, Start] = {}
        self.ended_lines = self.paused = 0

    def hear(self, now_s: float, action: Action) -> None:
        match action:
            case Start():
                self.started[action.request_id] = action
            case Deliver():
                self.first_s.setdefault(action.request_id, now_s)
                self.ended_lines += action.request_id >= _FIRST_LINE and action.tokens[-1].finish is not None
            case Preempt():
                self.paused += action.request_id >= _FIRST_LINE
            case Fail():
                raise AssertionError(f"no request can fail here: {action}")
            case _:
                pass


def simulate_bulk(trace: Trace, setting: Setting, lines: int, until_s: float, seed: int = 5) -> BulkReport:
    """Play ``trace`` until ``until_s`` beside a batch, which is there from the start. Its lines have no common prefix.

    Others are measured that come after the ``setting.warm_up_s``.
    """
    members = [
        Member(PlayedShard(f"shard-{number:03}", kind.times), kind.limits, 0)
        for number, kind in enumerate(setting.shards)
    ]
    clients, rng = _Clients(), random.Random(seed)
    fleet = Fleet([Scheduler(setting.config)], members, clients.hear)
    fleet.begin()
    fleet.handle(
        [
            Submitted(
                request(
                    _FIRST_LINE + number,
                    rng.choices(range(2_000, 50_000), k=rng.randint(200, 800)),
                    rng.randint(50, 150),
                    ignore_eos=True,
                    tenant=BATCH,
                    priority=BULK_PRIORITY,
                )
            )
            for number in range(lines)
        ]
    )
    ticked_s = 0.0

    def advance(at_s: float) -> None:
        nonlocal ticked_s
        while ticked_s + _TICK_S <= at_s:
            ticked_s += _TICK_S
            fleet.run_until(ticked_s)
            fleet.tick()
        fleet.run_until(at_s)

    arrived_s: dict[int, float] = {}
    for number, arrival in enumerate(trace.arrivals, 1):
        if arrival.at_s >= until_s:
            break
        advance(arrival.at_s)
        arrived_s[number] = arrival.at_s
        tokens = arrival.output_tokens
        asked = request(number, arrival.prompt, tokens, ignore_eos=True, tenant=OTHERS, arrived_s=arrival.at_s)
        fleet.handle([Submitted(asked)])
    advance(until_s)
    ended_lines = clients.ended_lines
    while any(number not in clients.first_s for number in arrived_s):
        advance(fleet.now_s + 1.0)
    measured = [number for number, at_s in arrived_s.items() if at_s >= setting.warm_up_s]
    waits_s = sorted(clients.first_s[number] - arrived_s[number] for number in measured)
    starts = [clients.started[number] for number in measured]
    return BulkReport(
        lines=lines,
        others=len(measured),
        ttft_p50_s=percentile(waits_s, 0.5),
        ttft_p90_s=percentile(waits_s, 0.9),
        ttft_p99_s=percentile(waits_s, 0.99),
        cached=sum(one.cached_tokens for one in starts) / sum(one.prompt_tokens for one in starts),
        lines_per_s=ended_lines / until_s,
        paused=clients.paused,
    )
