"""The policies for jobs on real servers: what is started, and how the figures are compared."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench import serve_with_policy
from bench.contenders import Common, Product
from bench.job_policies import WithPolicy, longest, plans_of, table
from bench.simulate.policies import JobPolicy, LeastRecentlyUsed

from caravan_router.engine import batcher
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.jobs.expected_return import ExpectedReturn
from caravan_serve.bench.agents import AgentPlan, Turn
from caravan_serve.bench.agents_run import AgentsResult
from caravan_serve.bench.statistics import distribution

RESULT = AgentsResult(
    agents=8,
    requests=50,
    completed=50,
    session_s=distribution([30.0]),
    first_ttft_s=distribution([2.0]),
    return_ttft_s=distribution([1.0]),
    chat_ttft_s=distribution([3.0]),
    prompt_tokens=1000,
    computed_share=0.3,
    output_tokens=500,
    duration_s=60.0,
    failures=(),
)


def policy_of_an_engine() -> object:
    return vars(batcher)["Scheduler"](SchedulerConfig()).state.policy


def test_a_server_starts_with_the_named_policy_and_leaves_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    served = []

    def serve(flags: list[str]) -> int:
        served.append((flags, policy_of_an_engine()))
        return 0

    monkeypatch.setattr(serve_with_policy, "serve", serve)
    monkeypatch.setattr(sys, "argv", ["serve_with_policy", "LRU", "-c", "512"])
    assert serve_with_policy.main() == 0
    [(flags, policy)] = served
    assert flags == ["-c", "512"]
    assert isinstance(policy, LeastRecentlyUsed)
    assert isinstance(policy_of_an_engine(), ExpectedReturn)


def test_servers_differ_in_their_policy_alone() -> None:
    commands = []
    for policy in JobPolicy:
        contender = WithPolicy(name=policy.name, product=Product.CARAVAN, slots=9, cells=5000, policy=policy)
        commands.append(contender.command(Common(model=Path("m.gguf"), threads=2), 3000))
    program, *flags = commands[0][:3], *commands[0][4:]
    assert program == [sys.executable, "-m", "bench.serve_with_policy"]
    assert flags[0] == "-m"
    assert all([*command[:3], *command[4:]] == [*program, *flags] for command in commands)
    assert [command[3] for command in commands] == ["LRU", "LAS", "CARAVAN"]


def test_the_longest_context_of_a_session_counts_answers_and_begins_anew_with_a_summary() -> None:
    turn = Turn(text="a b c", tokens=10)
    assert longest(AgentPlan("s t", (turn, turn))) == 2 + 3 + 10 + 3 + 10
    assert longest(AgentPlan("s t", (turn, turn, replace(turn, summary="u v w")))) == 28
    sub = AgentPlan("s t", (Turn(text="a b c", tokens=50),))
    assert longest(AgentPlan("s t", (replace(turn, sub_agent=sub),))) == 2 + 50 + 3 + 10


def test_sessions_end_early() -> None:
    assert {len(plan.turns) for plan in plans_of(1, 3)} == {3}
    assert len(plans_of(1, 3)) == 8


def test_the_table_compares_rounds() -> None:
    slow = replace(RESULT, session_s=distribution([60.0]))
    slower = replace(RESULT, session_s=distribution([120.0]))
    lines = table({JobPolicy.LRU: [slow, slower, slow], JobPolicy.CARAVAN: [RESULT] * 3}).splitlines()
    assert lines[0] == "| work | LRU | Caravan | Caravan / LRU |"
    assert lines[2] == "| mean session, s | 60.00 | 30.00 | 0.50 (0.25 to 0.50) |"
