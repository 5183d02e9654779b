"""Figures of the last minute."""

import pytest

from caravan_studio.timeline.figures import WINDOW_S, RecentFigures


def test_rates_are_of_the_time_since_the_count_began() -> None:
    figures = RecentFigures(100.0)
    for step in range(20):
        figures.note_step("a", 100.0 + step / 10, tokens=5, following=5)
    figures.note_prompt(101.0, 300)
    found = figures.figures(102.0)
    assert (found.window_s, found.tokens_s, found.steps_s, found.prompt_tokens_s) == (2.0, 50.0, 10.0, 150.0)


def test_what_is_older_than_a_minute_is_forgotten() -> None:
    figures = RecentFigures(0.0)
    figures.note_start(0.5, 1000, 1000)
    figures.note_step("a", 0.5, tokens=100, following=0)
    figures.note_start(WINDOW_S + 5.0, 100, 25)
    found = figures.figures(WINDOW_S + 6.0)
    assert (found.window_s, found.tokens_s, found.requests, found.hit_rate) == (WINDOW_S, 0.0, 1, 0.25)


def test_gaps_are_those_between_the_tokens_of_a_shard() -> None:
    figures = RecentFigures(0.0)
    for step in range(100):
        figures.note_step("a", step * 0.02, tokens=3, following=3)
        figures.note_step("b", step * 0.02, tokens=1, following=1)
    itl = figures.figures(2.0).itl_s
    assert itl is not None
    assert itl.p50 == pytest.approx(0.02, rel=0.1)


def test_steps_that_are_reported_together_share_the_time_since_the_last_report() -> None:
    figures = RecentFigures(0.0)
    for report in range(1, 50):
        for _ in range(4):
            figures.note_step("a", report * 0.08, tokens=2, following=2)
    itl = figures.figures(4.0).itl_s
    assert itl is not None
    assert itl.p50 == pytest.approx(0.02, rel=0.1)


def test_first_tokens_have_quantiles_and_nothing_has_none() -> None:
    figures = RecentFigures(0.0)
    assert figures.figures(1.0).ttft_s is None
    assert figures.figures(1.0).hit_rate is None
    for _ in range(99):
        figures.note_first_token(1.0, 0.1)
    for _ in range(2):
        figures.note_first_token(1.0, 3.0)
    ttft = figures.figures(2.0).ttft_s
    assert ttft is not None
    assert ttft.p50 == pytest.approx(0.1, rel=0.1)
    assert ttft.p99 == pytest.approx(3.0, rel=0.1)
