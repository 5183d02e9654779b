"""The order of the loads, and ratios of neighbours in time."""

import pytest
from bench.summary import Spread, ratios, spread, turns


def _order(peers: str, rounds: int) -> str:
    return " ".join(name for number in range(rounds) for group in turns("A", peers, number) for name in group)


def test_two_servers_are_loaded_in_the_order_abba() -> None:
    assert _order("B", 4) == "A B B A A B B A"


def test_with_two_peers_ours_is_always_between_them() -> None:
    assert _order("BC", 3) == "B A C C A B B A C"


@pytest.mark.parametrize("peers", ["", "B", "BC", "BCD", "BCDE"])
@pytest.mark.parametrize("round_number", [0, 1])
def test_every_peer_is_next_to_ours_once_in_a_round(peers: str, round_number: int) -> None:
    groups = turns("A", peers, round_number)
    assert sorted(name for group in groups for name in group if name != "A") == sorted(peers)
    for group in groups:
        place = group.index("A")
        assert all(abs(group.index(name) - place) == 1 for name in group if name != "A")


def test_a_spread_has_the_median_and_the_extremes() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([]) is None


def test_pairs_without_one_of_their_values_have_no_ratio() -> None:
    assert ratios([(1.0, 2.0), (None, 2.0), (1.0, None), (1.0, 0.0), (3.0, 2.0)]) == [0.5, 1.5]
