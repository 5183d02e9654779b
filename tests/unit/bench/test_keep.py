"""What is kept of comparisons for the documents."""

from typing import Any

from bench.keep import keep


def report(model: str, row: str, ours: float, rounds: int = 1) -> dict[str, Any]:
    def spread(value: float) -> dict[str, float]:
        return {"median": value, "low": value / 2, "high": 2 * value}

    line = {
        "label": f"{row}: tokens/s",
        "ours": spread(ours),
        "peer": "split",
        "theirs": spread(1000.0),
        "ratio": spread(ours / 1000),
        "bound": None,
        "share": None,
    }
    conditions = {"machine": "a host", "threads": 1, "llama-cpp-python": "1", "rounds": rounds}
    return conditions | {"models": {model: [{"row": row, "lines": [line]}]}}


def test_the_last_report_of_a_row_counts() -> None:
    rows = keep([report("a", "greedy-whole-8", 1234.56), report("a", "greedy-whole-8", 2000.0, rounds=3)])["rows"]
    assert rows == [
        {
            "model": "a",
            "row": "greedy-whole-8",
            "work": "greedy-whole-8: tokens/s",
            "rounds": 3,
            "ours": 2000.0,
            "peer": "split",
            "theirs": 1000.0,
            "ratio": {"median": 2.0, "low": 1.0, "high": 4.0},
            "share": None,
        }
    ]


def test_rows_have_the_order_of_their_profile_and_models_their_own() -> None:
    reports = [
        report("a", "greedy-whole-8", 1.0),
        report("a", "greedy-whole-1", 1.0),
        report("b", "greedy-whole-1", 1.0),
    ]
    assert [(row["row"], row["model"]) for row in keep(reports)["rows"]] == [
        ("greedy-whole-1", "a"),
        ("greedy-whole-1", "b"),
        ("greedy-whole-8", "a"),
    ]


def test_figures_that_llama_server_does_not_have_are_left_out() -> None:
    alone = report("a", "greedy-whole-8", 1.0)
    alone["models"]["a"][0]["lines"][0] |= {"peer": None, "theirs": None, "ratio": None}
    assert keep([alone])["rows"] == []


def test_rows_without_llama_server_are_left_out() -> None:
    assert [row["row"] for row in keep([report("a", "scarce", 1.0), report("a", "decode-8", 1.0)])["rows"]] == [
        "decode-8"
    ]
