"""Simulates fleets: ``make simulate`` runs what docs/simulator.md and docs/sizing.md show and records the results.

With ``--trace`` or ``--file`` it simulates one trace and prints a line for each policy; with ``--bulk``, one for each
batch beside it. With ``--agents``, or a file of sessions, it compares policies for jobs.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.simulate.agent_traces import Session, agentic_code, mean_context, read_sessions, synthesize
from bench.simulate.agents import AgentReport, AgentSetting, simulate_agents
from bench.simulate.bulk import BulkReport, simulate_bulk
from bench.simulate.policies import JobPolicy
from bench.simulate.results import Report, Targets
from bench.simulate.scenarios import FAST, SCENARIOS, SEED, SHARDS, SIZINGS, SLOW, Run, Sizing, best_alone, runs
from bench.simulate.simulation import LINEAR, Autoscaler, Policy, Setting, ShardKind, recorded, simulate
from bench.simulate.traces import TRACES, Load, Trace, read_trace

RESULTS = Path(__file__).with_name("results.json")
SIZING_RESULTS = Path(__file__).with_name("sizing.json")


def main() -> None:
    """Simulate what the arguments say."""
    args = _parser().parse_args()
    if args.agents:
        _simulate_agents(args)
    elif args.trace or args.file:
        _simulate_one(args)
    else:
        with ProcessPoolExecutor(args.processes) as pool:
            _record_sizings(pool)
            _record(pool)


def _record_sizings(pool: ProcessPoolExecutor) -> None:
    """Run all sizings and write SIZING_RESULTS."""
    entries = []
    for sizing, report in zip(SIZINGS, pool.map(Sizing.report, SIZINGS), strict=True):
        print(f"{sizing.table}, {', '.join(sizing.shown)}: {_line(Policy.CARAVAN, report)}", flush=True)
        entries.append({"table": sizing.table, "shown": sizing.shown, **_rounded(report)})
    SIZING_RESULTS.write_text(json.dumps(entries, indent=1) + "\n")


def _record(pool: ProcessPoolExecutor) -> None:
    """Run all scenarios and write RESULTS."""
    planned = list(runs())
    alone = pool.map(best_alone, (FAST, SLOW), ("poisson", "poisson"))
    reports = []
    for run, report in zip(planned, pool.map(Run.report, planned), strict=True):
        print(f"{run.scenario.name}, {_line(run.policy, report)}", flush=True)
        reports.append(report)
    fast, slow = alone
    entries = [
        {"scenario": run.scenario.name, "rate": run.rate, "policy": run.policy.value, **_rounded(report)}
        for run, report in zip(planned, reports, strict=True)
    ]
    RESULTS.write_text(
        json.dumps(
            {
                "scenarios": [{"name": one.name, "shown": one.shown} for one in SCENARIOS],
                "alone": {"fast": round(fast, 4), "slow": round(slow, 4)},
                "runs": entries,
            },
            indent=1,
        )
        + "\n"
    )


def _rounded(report: Report) -> dict[str, Any]:
    # The processor time differs from run to run; `bench.plan_cost` measures it.
    values = asdict(report)
    del values["step_cpu_us"]
    return {name: round(value, 4) for name, value in values.items()}


def _simulate_one(args: argparse.Namespace) -> None:
    times = recorded(args.times) if args.times else LINEAR
    kind = ShardKind(times=times, sequences=args.sequences, cells=args.cells, host_cells=args.host_cells)
    slow = ShardKind(
        times=times.slower(args.factor), sequences=args.sequences, cells=args.cells, host_cells=args.host_cells
    )
    shards = (kind,) * (args.shards - args.slow) + (slow,) * args.slow
    setting = Setting(
        shards=shards,
        autoscaler=_autoscaler(args),
        targets=Targets(ttft_s=args.ttft, itl_s=args.itl),
        warm_up_s=min(10.0, args.seconds / 4),
    )
    for trace in _traces(args):
        if args.bulk:
            for lines in args.bulk:
                print(_bulk_line(simulate_bulk(trace, setting, lines, args.seconds)), flush=True)
            continue
        for policy in args.policy or ([Policy.CARAVAN] if setting.autoscaler else Policy):
            report = simulate(trace, setting, policy, min(args.seconds, trace.arrivals[-1].at_s + 1.0))
            print(_line(policy, report), flush=True)


def _bulk_line(report: BulkReport) -> str:
    return (
        f"{report.lines:5} lines, {report.others} others, TTFT p50 {report.ttft_p50_s:6.3f} "
        f"p90 {report.ttft_p90_s:6.3f} p99 {report.ttft_p99_s:6.3f} s, cached {report.cached:4.0%}, "
        f"{report.lines_per_s:5.2f} lines/s, {report.paused} pauses"
    )


# Agents of each shard, of which a third have room at a time.
_AGENTS_PER_SHARD = 8
_ROOM_SHARE = 3


def _simulate_agents(args: argparse.Namespace) -> None:
    """Print how long the jobs of agents take, under each policy, with room for a third of their contexts."""
    for agents in args.agents:
        sessions = _sessions(args, agents)
        count = max(1, len(sessions) // _AGENTS_PER_SHARD)
        cells = int(len(sessions) / _ROOM_SHARE * mean_context(sessions) / count)
        kind = ShardKind(sequences=args.sequences, cells=cells, host_cells=args.host_cells)
        setting = AgentSetting(shards=(kind,) * count, seed=args.seed)
        for policy in args.job_policy or JobPolicy:
            print(f"{agents:3} agents, {_agent_line(simulate_agents(sessions, setting, policy))}", flush=True)


def _sessions(args: argparse.Namespace, agents: int) -> tuple[Session, ...]:
    if args.file:
        return read_sessions(args.file, speed=args.speed)[:agents]
    return synthesize(agentic_code(agents, args.seed, scale=args.scale))


def _agent_line(report: AgentReport) -> str:
    return (
        f"{report.policy:22} job mean {report.job_s:6.1f} p99 {report.job_p99_s:6.1f} s, "
        f"returns at once {report.at_once:4.0%}, computed {report.computed:4.0%}, "
        f"chat TTFT p50 {report.chat_ttft_p50_s:5.2f} p99 {report.chat_ttft_p99_s:5.2f} s, "
        f"longest wait {report.longest_wait_s:5.0f} s, scheduler {report.cpu_us:3.0f} us a step"
    )


def _autoscaler(args: argparse.Namespace) -> Autoscaler | None:
    if not args.most_shards:
        return None
    return Autoscaler(
        least=args.shards,
        most=args.most_shards,
        requests_per_shard=args.requests_per_shard,
        starts_s=args.starts,
        stabilization_s=args.stabilization,
    )


def _traces(args: argparse.Namespace) -> Iterator[Trace]:
    if args.file:
        yield read_trace(args.file, speed=args.speed)
    else:
        for rate in args.rate:
            yield TRACES[args.trace](Load(per_second=rate, seconds=args.seconds, seed=args.seed))


def _line(policy: Policy, report: Report) -> str:
    return (
        f"{policy.value:14} {report.offered:6.1f}/s, good {report.goodput:6.1f}/s, "
        f"TTFT p50 {report.ttft_p50_s:5.2f} p99 {report.ttft_p99_s:5.2f} s, "
        f"ITL p50 {1e3 * report.itl_p50_s:3.0f} p99 {1e3 * report.itl_p99_s:3.0f} ms, hits {report.hit_rate:4.0%}, "
        f"{report.output_tokens_per_s:5.0f} tokens/s, {report.shards:4.1f} shards, "
        f"scheduler {report.step_cpu_us:3.0f} us a step"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.simulate", description=__doc__)
    parser.add_argument("--processes", type=int, default=2, help="of all scenarios: how many run at once")
    parser.add_argument("--trace", choices=TRACES, help="a synthetic trace")
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[60.0], help="its requests per second; several: in turn"
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--file", type=Path, help="a recorded trace, as JSON lines in Mooncake's or AIPerf's format")
    parser.add_argument(
        "--agents", type=int, nargs="+", help="so many sessions of agents, of FILE or synthetic, beside a chat"
    )
    parser.add_argument("--bulk", type=int, nargs="+", help="beside a trace: the lines of a batch; several: in turn")
    parser.add_argument("--scale", type=float, default=0.25, help="of the lengths of synthetic agents: 1 is AIPerf's")
    parser.add_argument("--job-policy", type=_job_policy, nargs="+", help="for agents: lru, las, caravan")
    parser.add_argument("--speed", type=float, default=1.0, help="play it so many times as fast")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop asking after so long")
    parser.add_argument("--policy", type=_policy, nargs="+", help="round-robin, least-requests, prefix-hash, caravan")
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--most-shards", type=int, default=0, help="an autoscaler adds shards up to so many")
    parser.add_argument(
        "--requests-per-shard", type=float, default=24.0, help="the requests for which it wants a shard"
    )
    parser.add_argument("--starts", type=float, default=90.0, help="seconds until a new shard serves")
    parser.add_argument(
        "--stabilization", type=float, default=300.0, help="seconds for which fewer shards suffice before one leaves"
    )
    parser.add_argument("--slow", type=int, default=0, help="how many of them are slow")
    parser.add_argument("--factor", type=float, default=3.0, help="how many times slower these are")
    parser.add_argument("--times", type=Path, help="step times recorded with `bench.shard_steps --record`")
    parser.add_argument("--sequences", type=int, default=32, help="of a shard")
    parser.add_argument("--cells", type=int, default=40_000, help="of a shard")
    parser.add_argument("--host-cells", type=int, default=0, help="cells that fit the host memory of a shard")
    parser.add_argument("--ttft", type=float, default=2.0, help="target for the first token, in seconds")
    parser.add_argument("--itl", type=float, default=0.2, help="target for the mean gap, in seconds")
    return parser


def _policy(text: str) -> Policy:
    return Policy[text.replace("-", "_").upper()]


def _job_policy(text: str) -> JobPolicy:
    return JobPolicy[text.upper()]


if __name__ == "__main__":
    main()
