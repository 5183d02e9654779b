"""Summaries of rounds, and the table made of them."""

from typing import Any

import pytest
from bench.bounds import Attention, EngineRun, EngineTime, whole
from bench.contenders import against_llama_server
from bench.figures import rate, ttft
from bench.fleet import Load
from bench.output import disturbance, document, table
from bench.rows import Row
from bench.summary import Round, RowResult, Spread, summarise

LINEUP = against_llama_server(slots=8, cells=1000)
ROW = Row(
    name="plain",
    title="plain",
    lineup=LINEUP,
    arguments=("--workload", "plain"),
    figures=(rate("", "output_tokens_per_s", whole(8, 64)), ttft("")),
)
RUN = EngineRun(prompt_tokens=110, output_tokens=64, sequences=8)


def _load(tokens_per_s: float, ttft_s: float, *, failed: bool = False) -> Load:
    summary: dict[str, Any] = {
        "errors": {"timeout": 1} if failed else {},
        "output_tokens_per_s": tokens_per_s,
        "ttft_s": {"p50": ttft_s},
    }
    return Load(seed=1, report={"phases": [{"summary": summary}]}, idle_share=0.01, others_share=tokens_per_s / 1000)


def _round(caravan: Load, split: Load, unified: Load) -> Round:
    groups = ({"split": split, "Caravan": caravan, "unified": unified},)
    return Round(
        groups=groups, prompt_tokens=110, engine={Attention.FLASH: {RUN: EngineTime(prefill_s=2.0, decode_s=2.0)}}
    )


def _result() -> RowResult:
    rounds = [
        _round(_load(64, 0.1), _load(80, 0.2), _load(70, 0.1)),
        _round(_load(96, 0.3), _load(80, 0.4), _load(70, 0.1)),
        _round(_load(72, 0.2), _load(80, 0.2), _load(70, 0.1)),
    ]
    return RowResult(row=ROW, lineup=LINEUP, rounds=rounds)


def test_the_ratio_is_the_median_of_the_ratios_of_neighbours() -> None:
    speed, first_token = summarise(_result())
    assert speed.ratio == Spread(72 / 80, 64 / 80, 96 / 80)
    assert first_token.ratio is not None
    assert first_token.ratio.median == pytest.approx(0.75)


def test_all_figures_compare_with_the_peer_that_is_best_in_the_first() -> None:
    speed, first_token = summarise(_result())
    assert (speed.peer, first_token.peer) == ("split", "split")
    assert speed.theirs == Spread(80, 80, 80)


def test_the_share_of_the_bound_is_the_median_over_the_rounds() -> None:
    speed, first_token = summarise(_result())
    assert speed.bound == Spread(128, 128, 128)
    assert speed.share == Spread(72 / 128, 64 / 128, 96 / 128)
    assert first_token.bound is first_token.share is None


def test_a_load_with_a_failed_request_has_no_figure() -> None:
    result = _result()
    result.rounds.append(_round(_load(1, 9, failed=True), _load(80, 0.2), _load(70, 0.1)))
    speed, _ = summarise(result)
    assert speed.ours == Spread(72, 64, 96)
    assert speed.ratio is not None
    assert speed.ratio.low == pytest.approx(0.8)


def test_the_table_has_one_line_for_each_figure() -> None:
    assert table([_result()]).splitlines() == [
        "| work | Caravan | compared with | ratio (lowest to highest) | bound | share of bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| plain: tokens/s | 72.0 | 80.0 (split) | 0.90 (0.80 to 1.20) | 128.0 | 0.56 |",
        "| plain: TTFT p50, ms | 200.0 | 200.0 (split) | 0.75 (0.50 to 1.00) |  |  |",
    ]


def test_a_row_without_peers_has_our_figures_alone() -> None:
    rounds = [Round(groups=({"Caravan": _load(64, 0.1)},), prompt_tokens=None, engine={})]
    result = RowResult(row=ROW, lineup=LINEUP.only(()), rounds=rounds)
    assert table([result]).splitlines()[2] == "| plain: tokens/s | 64.0 |  |  |  |  |"


def test_the_report_says_how_much_cpu_time_others_used() -> None:
    text = disturbance([_result()])
    assert "at most 1.0% of a core" in text
    assert "7% of the machine in the median, and at most 10%" in text


def test_the_document_has_every_load() -> None:
    (row,) = document([_result()])
    assert [round_["groups"][0]["Caravan"]["seed"] for round_ in row["rounds"]] == [1, 1, 1]
    assert row["rounds"][0]["engine"][0]["decode_s"] == 2.0
