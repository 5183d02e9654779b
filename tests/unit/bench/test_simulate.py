"""Fleets in virtual time: what they measure, and that the table of docs/simulator.md is what they measure today."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.simulate.__main__ import RESULTS, SIZING_RESULTS
from bench.simulate.agent_traces import agentic_code, mean_context, read_sessions, synthesize
from bench.simulate.agents import AgentSetting, simulate_agents
from bench.simulate.policies import JobPolicy
from bench.simulate.results import Clients, Targets
from bench.simulate.scenarios import SCENARIOS, SIZINGS, Run, runs
from bench.simulate.simulation import (
    LINEAR,
    Autoscaler,
    LeastRequests,
    Policy,
    PrefixHash,
    RoundRobin,
    Scaling,
    Setting,
    ShardKind,
    StepTimes,
    recorded,
    simulate,
)
from bench.simulate.traces import TRACES, Load, read_trace

from caravan_proto.messages.results import FinishReason
from caravan_scheduler.actions import Deliver, Start
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.requests import request

LOAD = Load(per_second=20, seconds=10, seed=3)
SETTING = Setting(shards=(ShardKind(),) * 4, warm_up_s=2.0)


def test_points_are_joined_by_lines_of_which_the_last_continues() -> None:
    times = StepTimes(decode=((0, 1.0), (10, 2.0), (20, 5.0)), prompt=((0, 0.0), (1, 0.5)), pair_s=0.001)
    assert times.seconds(5) == 1.5
    assert times.seconds(15) == 3.5
    assert times.seconds(30) == 8.0
    assert times.seconds(10, prompt_tokens=4, pairs=1000) == pytest.approx(2.0 + 2.0 + 1.0)
    assert times.slower(3).seconds(10, prompt_tokens=4, pairs=1000) == pytest.approx(15.0)


def test_recorded_times_are_read(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"decode": [[1, 0.01], [8, 0.05]], "prompt": [[0, 0.0], [64, 0.2]]}))
    assert recorded(file).seconds(8, prompt_tokens=32) == pytest.approx(0.15)


@pytest.mark.parametrize("name", TRACES)
def test_traces_depend_on_their_seed_alone(name: str) -> None:
    trace = TRACES[name](LOAD)
    assert trace == TRACES[name](LOAD)
    assert trace != TRACES[name](replace(LOAD, seed=4))
    times = [arrival.at_s for arrival in trace.arrivals]
    assert times == sorted(times)


def test_round_robin_takes_turns_and_least_requests_takes_the_idlest() -> None:
    turns, least = RoundRobin(), LeastRequests()
    assert [turns.choose((), [9, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    assert [least.choose((), [1, 0, 0]) for _ in range(3)] == [1, 2, 1]


def test_equal_beginnings_go_to_one_shard_until_that_has_a_quarter_more_than_the_others() -> None:
    ring = PrefixHash(8)
    idle = [0] * 8
    home = ring.choose((1, 2, 3), idle)
    assert all(ring.choose((1, 2, 3), idle) == home for _ in range(3))
    assert len({ring.choose((number,), idle) for number in range(50)}) == 8
    busy = [10] * 8
    busy[home] = 14
    assert ring.choose((1, 2, 3), busy) != home


def deliver(clients: Clients, now_s: float, *, last: bool = False) -> None:
    token = GeneratedToken(1, b"", False, None, (), FinishReason.LENGTH if last else None)
    clients.hear(now_s, Deliver(1, (), (token,)))


@pytest.mark.parametrize(("first_s", "gap_s", "good"), [(1.9, 0.1, True), (2.1, 0.1, False), (1.9, 0.3, False)])
def test_a_request_is_good_if_it_met_both_targets(first_s: float, gap_s: float, good: bool) -> None:
    clients = Clients(Targets(ttft_s=2.0, itl_s=0.2), 0.0, 10.0)
    clients.ask(1, 0.0)
    clients.hear(0.0, Start(1, "s", prompt_tokens=10, cached_tokens=4))
    assert not clients.are_decided(1.0)
    assert clients.are_decided(2.1)
    deliver(clients, first_s)
    deliver(clients, first_s + gap_s, last=True)
    report = clients.report(5.0)
    assert report.offered == 0.1
    assert report.goodput == (0.1 if good else 0.0)
    assert report.hit_rate == 0.4
    assert report.ttft_p50_s == first_s
    assert report.itl_p50_s == pytest.approx(gap_s)


@pytest.mark.parametrize("policy", Policy)
def test_a_simulation_repeats_exactly(policy: Policy) -> None:
    first, second = (
        replace(simulate(TRACES["conversations"](LOAD), SETTING, policy, 10.0), step_cpu_us=0.0) for _ in range(2)
    )
    assert first == second
    assert first.goodput == first.offered > 0


def test_every_token_arrives_once() -> None:
    trace = TRACES["mixed-lengths"](LOAD)
    setting = replace(SETTING, warm_up_s=0.0, targets=Targets(ttft_s=math.inf, itl_s=math.inf))
    report = simulate(trace, setting, Policy.CARAVAN, 1000.0)
    assert report.output_tokens_per_s * 1000.0 == pytest.approx(sum(one.output_tokens for one in trace.arrivals))


@pytest.mark.slow
def test_a_fleet_grows_and_shrinks_with_its_load() -> None:
    load = replace(LOAD, per_second=10, seconds=150)
    autoscaler = Autoscaler(least=1, most=6, requests_per_shard=4, starts_s=20.0, stabilization_s=30.0)
    patient = Targets(ttft_s=math.inf, itl_s=math.inf)
    setting = Setting(shards=(ShardKind(),), warm_up_s=0.0, targets=patient, autoscaler=autoscaler)
    report = simulate(TRACES["day"](load), setting, Policy.CARAVAN, 150.0)
    assert report.goodput == report.offered
    fixed = simulate(TRACES["day"](load), replace(setting, autoscaler=None), Policy.CARAVAN, 150.0)
    assert fixed.shards == 1
    assert 1.5 < report.shards < 5
    assert report.ttft_p50_s < fixed.ttft_p50_s / 2


def test_an_autoscaler_keeps_shards_that_were_needed_lately() -> None:
    scheduler = Scheduler(SchedulerConfig())
    fleet = Fleet([scheduler], [Member(PlayedShard("first", LINEAR), ShardKind().limits, 0)], lambda _s, _action: None)
    fleet.begin()
    autoscaler = Autoscaler(least=1, most=3, requests_per_shard=1, every_s=10.0, starts_s=20.0, stabilization_s=50.0)
    scaling = Scaling(autoscaler, fleet, scheduler, LINEAR, ShardKind().limits)
    asked = [request(key, range(2000, 2010), 600, ignore_eos=True) for key in (1, 2, 3, 4)]
    fleet.handle([Submitted(one) for one in asked])
    shards = []
    for now_s in range(10, 120, 10):
        fleet.run_until(now_s)
        scaling.tick(now_s)
        shards.append(len(fleet.names))
    # Four requests run for 13 s. At 10 s, two more shards are wanted; at 60 s, none has been wanted for 50 s.
    assert shards == [1, 1, 3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert scaling.mean_shards(110) == pytest.approx((1 * 10 + 3 * 50 + 1 * 50) / 110)


def test_a_recorded_trace_is_replayed(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 520, "output_length": 0, "hash_ids": [7, 8]},
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, second = read_trace(file, speed=2.0).arrivals
    assert (first.at_s, len(first.prompt), first.output_tokens) == (0.5, 520, 1)
    assert (second.at_s, len(second.prompt), second.output_tokens) == (1.0, 600, 5)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:520]


AIPERF_LINES = [
    {"session_id": "b", "input_length": 600, "output_length": 5, "hash_ids": [0, 1], "timestamp": 500.0, "group_id": 0},
    {"session_id": "b", "input_length": 300, "output_length": 7, "hash_ids": [2], "delay": 1500.0},
    {"session_id": "a", "input_length": 600, "output_length": 5, "hash_ids": [0, 3], "timestamp": 0.0, "group_id": 0},
    {"input_length": 512, "output_length": 1, "hash_ids": [0], "timestamp": 900},
]


def lines_in(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_sessions_of_agents_are_read(tmp_path: Path) -> None:
    """What AIPerf 0.13 writes, and a line of Mooncake's."""
    first, second, third = read_sessions(lines_in(tmp_path / "dataset.jsonl", AIPERF_LINES))
    assert [(one.name, one.start_s, len(one.turns)) for one in (first, second, third)] == [
        ("a", 0.0, 1),
        ("b", 0.5, 2),
        ("", 0.9, 1),
    ]
    begins, goes_on = second.turns
    assert (goes_on.delay_s, goes_on.new_tokens, goes_on.output_tokens) == (1.5, 300, 7)
    assert len(begins.words()) == 600
    assert begins.words()[:512] == first.turns[0].words()[:512] == third.turns[0].words()


def test_a_session_that_begins_nowhere_is_named(tmp_path: Path) -> None:
    file = lines_in(tmp_path / "dataset.jsonl", [AIPERF_LINES[1]])
    with pytest.raises(ValueError, match="line 1: session 'b' begins without a timestamp"):
        read_sessions(file)
    with pytest.raises(ValueError, match="has sessions"):
        read_trace(file)


def test_synthetic_agents_are_like_those_of_aiperf() -> None:
    sessions = synthesize(agentic_code(40, seed=1))
    assert sessions == synthesize(agentic_code(40, seed=1)) != synthesize(agentic_code(40, seed=2))
    turns = [turn for session in sessions for turn in session.turns]
    assert 14 < len(turns) / 40 < 20
    assert 0.6 < sum(turn.calls_tools for turn in turns) / len(turns) < 0.75
    assert all(session.turns[0].blocks[:62] == tuple(range(62)) for session in sessions)
    assert max(sum(turn.new_tokens + turn.output_tokens for turn in one.turns) for one in sessions) < 168_500


@pytest.mark.slow
def test_jobs_end_sooner_than_with_other_policies() -> None:
    sessions = synthesize(agentic_code(8, seed=1, scale=0.1))
    setting = AgentSetting(shards=(ShardKind(cells=int(8 / 3 * mean_context(sessions))),))
    jobs_s = {policy: simulate_agents(sessions, setting, policy).job_s for policy in JobPolicy}
    assert jobs_s[JobPolicy.CARAVAN] < 0.8 * jobs_s[JobPolicy.LRU]
    assert jobs_s[JobPolicy.CARAVAN] < 0.9 * jobs_s[JobPolicy.LAS]


def test_the_recorded_results_are_those_of_all_scenarios() -> None:
    recorded_runs = json.loads(RESULTS.read_text())["runs"]
    planned = [(run.scenario.name, run.rate, run.policy.value) for run in runs()]
    assert [(run["scenario"], run["rate"], run["policy"]) for run in recorded_runs] == planned


@pytest.mark.slow
def test_the_recorded_sizings_are_those_that_are_simulated_and_true_today() -> None:
    recorded_sizings = json.loads(SIZING_RESULTS.read_text())
    assert [(one["table"], tuple(one["shown"])) for one in recorded_sizings] == [
        (one.table, one.shown) for one in SIZINGS
    ]
    assert SIZINGS[0].report().goodput == pytest.approx(recorded_sizings[0]["goodput"], rel=0.02)


@pytest.mark.slow
def test_the_recorded_results_are_true_today() -> None:
    """One of them is measured again. If this fails since placement changed, run ``make simulate``."""
    scenario = next(one for one in SCENARIOS if one.name == "shared prefixes")
    recorded_runs = json.loads(RESULTS.read_text())["runs"]
    found = next(
        run
        for run in recorded_runs
        if (run["scenario"], run["rate"], run["policy"]) == (scenario.name, 60, Policy.CARAVAN.value)
    )
    report = Run(scenario, 60, Policy.CARAVAN).report()
    assert report.goodput == pytest.approx(found["goodput"], rel=0.02)
    assert report.hit_rate == pytest.approx(found["hit_rate"], abs=0.02)
