"""What is compared with Caravan as it was, and what counts as a loss."""

from pathlib import Path

from bench.contenders import Product
from bench.figures import ROUTER_CPU
from bench.fleet import Load
from bench.revisions import compared_with, losses
from bench.rows import MAIN_ROWS, OVERHEAD_ROWS
from bench.summary import Round, RowResult

FOLDER = Path("/before")
ROW = compared_with(OVERHEAD_ROWS[0], FOLDER)


def _load(rate: float, cpu_us: float) -> Load:
    summary = {"errors": 0, "output_tokens_per_s": rate, "steady_tokens_per_s": rate}
    report = {"phases": [{"summary": summary, "cpu": {"cpu_us_per_output_token": cpu_us}}]}
    return Load(seed=0, report=report, idle_share=0.0, others_share=0.0)


def _result(*pairs: tuple[tuple[float, float], tuple[float, float]]) -> RowResult:
    """Return the result of rounds, each with rate and processor time now and before."""
    rounds = [
        Round(groups=({"Caravan": _load(*now), "before": _load(*before)},), prompt_tokens=None, engine={})
        for now, before in pairs
    ]
    return RowResult(row=ROW, lineup=ROW.lineup, rounds=rounds)


def test_the_only_peer_is_the_caravan_of_the_other_folder_with_the_same_flags() -> None:
    for row in (*MAIN_ROWS, *OVERHEAD_ROWS):
        lineup = compared_with(row, FOLDER).lineup
        (peer,) = lineup.peers
        assert peer.product is Product.CARAVAN
        assert (peer.slots, peer.cells, peer.flags) == (lineup.ours.slots, lineup.ours.cells, lineup.ours.flags)
        assert peer.checkout == FOLDER != lineup.ours.checkout


def test_the_bare_engine_is_not_measured_and_processor_time_is_that_of_the_whole_server() -> None:
    row = compared_with(MAIN_ROWS[0], FOLDER)
    assert [figure.bound for figure in row.figures] == [None] * len(row.figures)
    assert ROUTER_CPU not in row.figures
    assert row.lineup.ours.counts_shards
    assert row.lineup.peers[0].counts_shards


def test_a_lower_rate_and_a_higher_processor_time_are_losses() -> None:
    lost = losses({"m": [_result(((96.0, 105.0), (100.0, 100.0)))]})
    assert [line.rpartition(": ")[2] for line in lost] == ["0.960 of before", "1.050 of before"]


def test_the_median_of_the_rounds_counts_and_three_percent_is_tolerated() -> None:
    rounds = [((50.0, 200.0), (100.0, 100.0)), ((98.0, 102.0), (100.0, 100.0)), ((99.0, 99.0), (100.0, 100.0))]
    assert losses({"m": [_result(*rounds)]}) == []


def test_a_gain_is_no_loss() -> None:
    assert losses({"m": [_result(((150.0, 50.0), (100.0, 100.0)))]}) == []
