"""The workload ``agents``."""

import io

import pytest
from rich.console import Console
from unit.serve.bench.conftest import ToyServer

from caravan_serve.bench import agents
from caravan_serve.bench.agents import AgentPlan, Chat, agent_plans
from caravan_serve.bench.cli import main, print_report
from caravan_serve.bench.runner import BenchConfig, run_bench
from caravan_serve.bench.workloads import Shape, Workload


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tools end at once, and answers be short."""
    monkeypatch.setattr(agents, "_OUTPUT_TOKENS", (2, 4))
    monkeypatch.setattr(agents, "_CHAT_TOKENS", (2, 4))
    monkeypatch.setattr(agents, "_TOOL_MOST_S", 0.0)
    monkeypatch.setattr(agents, "_CHAT_GAP_S", (0.0, 0.0))


def all_plans(plans: tuple[AgentPlan, ...]) -> list[AgentPlan]:
    """Return the sessions and those of their agents."""
    subs = [turn.sub_agent for plan in plans for turn in plan.turns if turn.sub_agent is not None]
    return [*plans, *subs]


def test_the_same_seed_gives_the_same_sessions() -> None:
    assert agent_plans(Shape(seed=3)) == agent_plans(Shape(seed=3))
    assert agent_plans(Shape(seed=3)) != agent_plans(Shape(seed=4))
    assert [Chat(3).next_turn() for _ in range(2)] == [Chat(3).next_turn() for _ in range(2)]


def test_agents_share_their_system_prompt_and_differ_in_their_tasks() -> None:
    plans = all_plans(agent_plans(Shape(concurrency=8)))
    assert len({plan.system for plan in plans}) == 1
    assert len({plan.turns[0].text for plan in plans}) == len(plans)


def test_some_agents_have_an_agent_of_their_own_and_some_summarise_their_history() -> None:
    plans = agent_plans(Shape(concurrency=8))
    assert sum(any(turn.sub_agent for turn in plan.turns) for plan in plans) == 3
    assert sum(any(turn.summary for turn in plan.turns) for plan in plans) == 2


async def test_each_turn_sends_the_history_with_the_answers(toy: ToyServer, quick: None) -> None:
    report = await run_bench(_config(toy), Console(file=io.StringIO()))
    plan, *_ = agent_plans(Shape(concurrency=1))
    prompts = [str(body["prompt"]) for body in toy.bodies if str(body["prompt"]).startswith(plan.system)]
    assert prompts[0] == f"{plan.system}\n\n{plan.turns[0].text}\n"
    answer = "x" * plan.turns[0].tokens
    assert prompts[1] == f"{prompts[0]}{answer}\n\n{plan.turns[1].text}\n"
    assert len(prompts) == sum(len(one.turns) for one in all_plans((plan,)))
    result = report.agents
    assert result is not None
    assert (result.failures, result.requests, result.agents) == ((), len(prompts), 1)
    assert result.computed_share == pytest.approx(2 / 7)
    assert result.session_s is not None
    assert result.session_s.count == 1


async def test_a_summary_takes_the_place_of_the_history(toy: ToyServer, quick: None) -> None:
    await run_bench(_config(toy, agents=4), Console(file=io.StringIO()))
    (turn,) = [turn for plan in agent_plans(Shape(concurrency=4)) for turn in plan.turns if turn.summary]
    system = agent_plans(Shape(concurrency=4))[0].system
    assert f"{system}\n{turn.summary}\n\n{turn.text}\n" in {body["prompt"] for body in toy.bodies}


async def test_a_session_ends_with_the_first_request_that_fails(toy: ToyServer, quick: None) -> None:
    toy.mode = "429"
    report = await run_bench(_config(toy, agents=2), Console(file=io.StringIO()))
    assert report.agents is not None
    assert (report.agents.requests, report.agents.session_s, report.completed) == (2, None, 0)
    assert "Model is overloaded" in report.agents.failures[0]


async def test_the_report_names_what_was_measured(toy: ToyServer, quick: None) -> None:
    output = io.StringIO()
    report = await run_bench(_config(toy), Console(file=output))
    print_report(Console(file=output, width=120), report)
    assert "share of prompt tokens computed" in output.getvalue()
    assert "TTFT, after a tool" in output.getvalue()


@pytest.mark.parametrize("flags", [("--rate", "2"), ("--requests", "5"), ("--words", "9"), ("--tokens", "9")])
def test_flags_that_would_change_nothing_are_refused(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--url", "http://none", "--workload", "agents", *flags])
    assert "the workload agents has its own times and sizes" in capsys.readouterr().err


def _config(toy: ToyServer, *, agents: int = 1) -> BenchConfig:
    return BenchConfig(url=toy.url, workload=Workload.AGENTS, shape=Shape(concurrency=agents), warmup=0)
