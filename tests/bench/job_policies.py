"""Compares policies for jobs on real servers: `PYTHONPATH=tests python -m bench.job_policies`.

The servers differ in nothing but the policy: Caravan's own, and those of the simulator that it is compared with. Eight
agents work beside a chat, as in the workload `agents` of `caravan bench`. Cells fit three of the longest sessions, all
sessions share them, and nothing is saved in host memory. Rounds take turns. A run takes two to five minutes; with
`--turns` sessions end earlier, but the less they have, the less of what LRU computes was computed before.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from bench.contenders import Common, Contender, Product
from bench.load import load
from bench.paths import DEMO_MODEL, BenchError, describe, pinned_version
from bench.servers import serving
from bench.simulate.policies import JobPolicy
from caravan_serve.bench.agents import AgentPlan, Chat, agent_plans
from caravan_serve.bench.agents_run import AgentsResult, run_agents
from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.dialects import Api, dialect_of
from caravan_serve.bench.request import Asked
from caravan_serve.bench.statistics import Distribution
from caravan_serve.bench.workloads import Shape

_AGENTS, _FIT = 8, 3
# Of unrelated prompts, as `make bench` ages servers.
_AGE = ("--workload", "plain", "--words", "300", "--tokens", "8", "--requests", "16", "--concurrency", "8")
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WithPolicy(Contender):
    """Caravan with a policy for jobs."""

    policy: JobPolicy

    def command(self, common: Common, port: int) -> list[str]:
        """Return the command that serves on ``port`` of 127.0.0.1."""
        _, _, *flags = Contender.command(self, common, port)
        return [sys.executable, "-m", "bench.serve_with_policy", self.policy.name, *flags]


def plans_of(seed: int, turns: int | None) -> tuple[AgentPlan, ...]:
    """Return the sessions of a round, which end after ``turns``; None means the whole ones."""
    plans = agent_plans(Shape(concurrency=_AGENTS, seed=seed))
    return tuple(replace(plan, turns=plan.turns[:turns]) for plan in plans)


def longest(plan: AgentPlan) -> int:
    """Return the most tokens of a session and of its agents, whose words have a token each."""
    most, context = 0, _tokens(plan.system)
    for turn in plan.turns:
        if turn.summary is not None:
            context = _tokens(plan.system) + _tokens(turn.summary)
        if turn.sub_agent is not None:
            context += turn.sub_agent.turns[-1].tokens
            most = max(most, longest(turn.sub_agent))
        context += _tokens(turn.text) + turn.tokens
        most = max(most, context)
    return most


def _tokens(text: str) -> int:
    return len(text.split())


async def _agents(url: str, seed: int, turns: int | None) -> AgentsResult:
    connector = TCPConnector(limit=0, force_close=True)
    async with ClientSession(connector=connector, timeout=ClientTimeout(total=None)) as session:
        dialect = dialect_of(Api.COMPLETIONS, model="default", asked=Asked())
        client = SseClient(session=session, base_url=url, dialect=dialect, timeout_s=_TIMEOUT_S)
        result = await run_agents(client, plans_of(seed, turns), Chat(seed))
    if result.failures:
        raise BenchError(f"a request failed: {result.failures[0]}")
    return result


def _of(found: Distribution | None) -> Distribution:
    assert found is not None, "there are sessions, returns and chats in every round"
    return found


_FIGURES: Mapping[str, Callable[[AgentsResult], float]] = {
    "mean session, s": lambda result: _of(result.session_s).mean,
    "TTFT after a tool, mean, s": lambda result: _of(result.return_ttft_s).mean,
    "TTFT after a tool, p50, s": lambda result: _of(result.return_ttft_s).p50,
    "prompt tokens computed, %": lambda result: 100 * (result.computed_share or 0),
    "chat's TTFT p99, s": lambda result: _of(result.chat_ttft_s).p99,
}
Results: TypeAlias = Mapping[JobPolicy, Sequence[AgentsResult]]


def table(results: Results) -> str:
    """Return the medians in Markdown, and how Caravan compares with each other policy in the same round."""
    others = [policy for policy in results if policy is not JobPolicy.CARAVAN]
    head = ["work", *(policy.value for policy in results), *(f"Caravan / {policy.value}" for policy in others)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, read in _FIGURES.items():
        values = {policy: [read(one) for one in found] for policy, found in results.items()}
        row = [name, *(f"{median(found):.2f}" for found in values.values())]
        for policy in others:
            pairs = zip(values[JobPolicy.CARAVAN], values[policy], strict=True)
            ratios = sorted(ours / theirs for ours, theirs in pairs)
            row.append(f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measure(policies: Sequence[JobPolicy], given: argparse.Namespace) -> Results:
    """Run all policies in turn, every other round backwards."""
    seeds = range(1, given.rounds + 1)
    cells = _FIT * max(longest(plan) for seed in seeds for plan in plans_of(seed, given.turns))
    print(f"{cells} cells, {_AGENTS} agents", flush=True)
    results: dict[JobPolicy, list[AgentsResult]] = {policy: [] for policy in policies}
    with ExitStack() as stack:
        urls = {}
        for policy in policies:
            # One slot more than agents, for the chat.
            common: dict[str, Any] = {
                "product": Product.CARAVAN,
                "slots": _AGENTS + 1,
                "cells": cells,
                "flags": ("--cache-ram", "0", "--kv-layout", "unified"),
            }
            contender = WithPolicy(name=policy.name.lower(), policy=policy, **common)
            urls[policy] = stack.enter_context(serving(contender, Common(model=given.model, threads=given.threads))).url
            load(urls[policy], _AGE, seed=0)
        for seed in seeds:
            for policy in policies if seed % 2 else policies[::-1]:
                found = asyncio.run(_agents(urls[policy], seed, given.turns))
                results[policy].append(found)
                figures = ", ".join(f"{name} {read(found):.2f}" for name, read in _FIGURES.items())
                print(f"round {seed}, {policy.value}, {found.duration_s:.0f} s: {figures}", flush=True)
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [policy.name.lower() for policy in JobPolicy]
    parser.add_argument("--policies", nargs="+", choices=names, default=["lru", "caravan"])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--turns", type=int, help="maximum of a session (default: no limit)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    given = parser.parse_args()
    # The default action would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{describe()}, {given.threads} threads, {given.model.name}, llama-cpp-python {pinned_version()}", flush=True)
    print(f"\n{table(measure([JobPolicy[name.upper()] for name in given.policies], given))}")


if __name__ == "__main__":
    main()
