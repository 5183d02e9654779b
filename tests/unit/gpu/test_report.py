"""The page of the kit: it says what was measured, which goals were reached, and what is missing."""

from typing import Any

from gpu.kit.report import KINDS, Page, page_text
from gpu.kit.stages import End, Record

NOTHING: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in KINDS}


def _spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 0.1, "high": median + 0.1}


def _line(peer: str, ours: float, ratio: float) -> dict[str, Any]:
    return {
        "row": "greedy-streamed-32",
        "label": "32 streamed, greedy: tokens/s",
        "ours": _spread(ours),
        "peer": peer,
        "theirs": _spread(ours / ratio),
        "ratio": _spread(ratio),
    }


def _results(*, engine: float, step_ms: float) -> dict[str, dict[str, dict[str, Any]]]:
    step = {"steps": 256, "step": 9.0, "forward": 8.0, "sampling": 0.2, "between": 1.1, "router_cpu": step_ms - 1.0}
    lines = [_line("llama-server", 3000, 1.4), _line("llama-server -bs", 3000, 0.9)]
    return NOTHING | {
        "rows": {"8b-32": {"model": "8b", "streams": 32, "lines": lines}},
        "bound": {"8b": {"model": "8b", "tokens_per_s": {"32": engine}}},
        "between": {"8b": {"model": "8b", "greedy": step}},
    }


def _goals(text: str) -> list[str]:
    return [
        line for line in text.splitlines() if line.startswith("| 8b |") and (" at least " in line or " below " in line)
    ]


def test_each_goal_is_compared_with_what_was_found() -> None:
    results = _results(engine=3100.0, step_ms=1.9)
    goals = _goals(page_text(Page(rehearsal=False, stages={}, results=results)))
    assert goals == [
        "| 8b | 32 streams, at least 1.0 of llama-server -bs | 0.90 | no |",
        "| 8b | 32 streams, at least 1.3 of llama-server | 1.40 | yes |",
        "| 8b | 32 streams, at least 0.95 of llama-batched-bench | 0.97 | yes |",
        "| 8b | router and shard: below 2.0 ms a step of 32 | 1.90 | yes |",
    ]


def test_goals_that_are_missed_are_said_to_be() -> None:
    goals = _goals(page_text(Page(rehearsal=False, stages={}, results=_results(engine=4000.0, step_ms=2.1))))
    assert [goal.split(" | ")[-1] for goal in goals] == ["no |", "yes |", "no |", "no |"]


def test_rows_have_both_peers_and_the_share_of_the_engine() -> None:
    text = page_text(Page(rehearsal=False, stages={}, results=_results(engine=3000.0, step_ms=1.5)))
    row = "| 8b | 32 streamed, greedy | 3,000.0 | llama-server -bs | 3,333.3 | 0.90 (0.80 to 1.00) | 1.00 |"
    assert row in text.splitlines()
    assert row.replace("-bs | 3,333.3 | 0.90 (0.80 to 1.00)", "| 2,142.9 | 1.40 (1.30 to 1.50)") in text.splitlines()


def test_what_was_not_measured_is_said() -> None:
    text = page_text(Page(rehearsal=False, stages={}, results=NOTHING))
    assert text.count("Not measured.") == len(KINDS) - 1  # rows and their bound are one table
    assert "| rows | - | - | not run |" in text


def test_stages_and_failures_are_told() -> None:
    stages = {"build": Record(seconds=700.4, runs=2, end=End.DONE), "tests": Record(seconds=60, runs=1, end=End.FAILED)}
    host = {"host": {"facts": ["16 cores, a CPU", "a card, 80 GB"]}}
    tests = {"server": {"passed": 7, "skipped": 1, "failed": ["test_a", "test_b"]}}
    text = page_text(Page(rehearsal=True, stages=stages, results=NOTHING | {"tests": tests, "host": host}))
    assert "- 16 cores, a CPU\n- a card, 80 GB\n" in text
    assert text.startswith("# Rehearsal on the CPU")
    assert "| build | 700 | 2 | done |" in text
    assert "| tests | 60 | 1 | failed |" in text
    assert "- server: 7 passed, 1 skipped, 2 failed: test_a, test_b" in text
