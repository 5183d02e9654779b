"""The rows are complete: their arguments are accepted, and their figures can be read."""

from itertools import groupby
from pathlib import Path

import pytest
from bench.__main__ import chosen, chosen_peers
from bench.contenders import Common, Product
from bench.paths import BenchError
from bench.rows import EMBEDDING_ROWS, MAIN_ROWS, OVERHEAD_ROWS, Row

from caravan_serve.bench.cli import _config, bench_parser
from caravan_serve.bench.workloads import Workload, phases

ROWS = (*MAIN_ROWS, *OVERHEAD_ROWS, *EMBEDDING_ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_load_generator_accepts_the_arguments(row: Row) -> None:
    parser = bench_parser()
    config, _ = _config(parser, parser.parse_args(["--url", "http://127.0.0.1:1", *row.arguments]))
    if config.workload is not Workload.STALL:
        assert all(phase.requests for phase in phases(config.workload, config.shape))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_names_of_servers_are_unique_in_a_lineup(row: Row) -> None:
    names = [contender.name for contender in (row.lineup.ours, *row.lineup.peers)]
    assert len(set(names)) == len(names)


def test_rows_with_the_same_servers_are_next_to_each_other() -> None:
    lineups = [lineup for lineup, _ in groupby(ROWS, key=lambda row: row.lineup)]
    assert len(set(lineups)) == len(lineups)


def test_names_of_rows_are_unique() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_rows_are_chosen_by_patterns() -> None:
    assert [row.name for row in chosen(["decode-8", "plain-*"], ROWS)] == ["plain-1", "plain-8", "decode-8", "plain-32"]
    assert chosen(None, MAIN_ROWS) == MAIN_ROWS


def test_a_pattern_that_matches_no_row_is_an_error() -> None:
    with pytest.raises(BenchError, match="no row 'nothing'"):
        chosen(["decode-8", "nothing"], ROWS)


def test_a_peer_that_no_row_compares_with_is_an_error() -> None:
    assert chosen_peers(["split"], ROWS) == ("split",)
    with pytest.raises(BenchError, match="no peer 'other': the chosen rows compare with ample, llama-server, spin"):
        chosen_peers(["split", "other"], ROWS)


def test_caravan_runs_with_its_default_flags(tmp_path: Path) -> None:
    ours = ROWS[0].lineup.ours
    assert ours.product is Product.CARAVAN
    command = ours.command(Common(model=tmp_path / "m.gguf", threads=2), 3000)
    flags = {word for word in command if word.startswith("-")}
    assert flags == {"-m", "-np", "-c", "-t", "--port"}
