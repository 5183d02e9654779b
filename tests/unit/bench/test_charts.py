"""The charts that documents show of kept comparisons."""

import json
from pathlib import Path

import comparisons
import pytest


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ratio = {"median": 2.0, "low": 1.0, "high": 4.0}
    row = {"model": "m", "ratio": ratio}
    works = ("decode: tokens/s", "plain & quiet: tokens/s", "plain: TTFT p50, ms")
    (tmp_path / "some.json").write_text(json.dumps({"rows": [row | {"work": work} for work in works]}))
    (tmp_path / "rates.json").write_text(json.dumps({"rows": [row | {"work": works[0]}]}))
    monkeypatch.setattr(comparisons, "FIGURES", tmp_path)


def test_rates_and_times_have_a_chart_each_and_an_empty_group_has_none() -> None:
    assert [path.name for path in comparisons.charts()] == ["rates-rates.svg", "some-rates.svg", "some-times.svg"]


def test_a_chart_has_a_bar_for_each_work_of_its_group() -> None:
    rates, times = (comparisons.chart("some", group) or "" for group in comparisons.GROUPS)
    assert (rates.count("2.00"), times.count("2.00")) == (2, 1)
    assert "plain &amp; quiet<" in rates
    assert "TTFT" not in rates
    assert "plain: TTFT p50, ms" in times
