"""How many cells sequences will need."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.forecast import peak_cells

ENTRY = st.tuples(st.integers(0, 60), st.integers(0, 40))
ENTRIES = st.lists(ENTRY, max_size=12)


def simulated_peak(entries: list[tuple[int, int]]) -> int:
    """In each step every sequence takes a cell, then sequences that took their last free all they hold."""
    held = [cells for cells, _ in entries]
    remaining = [cells for _, cells in entries]
    peak = sum(held)
    there = set(range(len(entries)))
    while there := {index for index in there if remaining[index] > 0}:
        for index in there:
            held[index] += 1
            remaining[index] -= 1
        peak = max(peak, sum(held[index] for index in there))
    return peak


def test_no_sequences_need_no_cells() -> None:
    assert peak_cells([]) == 0


def test_one_sequence_needs_all_cells_it_will_hold() -> None:
    assert peak_cells([(10, 5)]) == 15


def test_sequences_that_end_early_make_room_for_the_others() -> None:
    assert peak_cells([(10, 5), (3, 100)]) == 103
    assert peak_cells([(100, 5), (3, 100)]) == 113, "less than 208, the sum of what each needs at most"


@given(entries=ENTRIES)
@example(entries=[(5, 0), (7, 0)])
def test_the_peak_is_that_of_a_step_by_step_simulation(entries: list[tuple[int, int]]) -> None:
    assert peak_cells(entries) == simulated_peak(entries)


@given(entries=ENTRIES, entry=ENTRY)
def test_one_more_sequence_never_lowers_the_peak(entries: list[tuple[int, int]], entry: tuple[int, int]) -> None:
    assert peak_cells([entry, *entries]) >= max(peak_cells(entries), sum(entry))


def lengths(*observed: int, window: int = 512) -> OutputLengths:
    result = OutputLengths(window)
    for length in observed:
        result.observe(length)
    return result


def test_the_longest_output_is_expected_until_enough_requests_ended() -> None:
    assert lengths().expected(0, 100) == 100
    assert lengths(*[5] * 15).expected(0, 100) == 100
    assert lengths(*[5] * 16).expected(0, 100) == 5


def test_four_of_five_outputs_are_no_longer_than_expected() -> None:
    outputs = lengths(*range(1, 101))
    assert outputs.expected(0, 1000) == 81
    assert outputs.expected(50, 1000) == 91, "among those that got as far"
    assert outputs.expected(99, 1000) == 100


def test_the_expectation_is_between_what_it_has_and_what_it_may_have() -> None:
    outputs = lengths(*range(1, 101))
    assert outputs.expected(0, 10) == 10
    assert outputs.expected(10, 10) == 10
    assert outputs.expected(98, 100) == 100
    assert outputs.expected(98, 99) == 99


def test_the_longest_output_is_expected_of_a_request_that_is_longer_than_any() -> None:
    assert lengths(*[5] * 100).expected(5, 64) == 64


def test_the_oldest_outputs_are_forgotten() -> None:
    outputs = lengths(*[500] * 20, *[10] * 20, window=20)
    assert outputs.expected(0, 1000) == 10
    assert outputs.expected(10, 1000) == 1000


@pytest.mark.parametrize("window", [16, 37, 512])
def test_the_expectation_is_a_quantile_of_the_newest_outputs(window: int) -> None:
    rng = random.Random(window)
    outputs = OutputLengths(window)
    observed: list[int] = []
    for _ in range(1500):
        length = int(rng.expovariate(1 / 60)) + 1
        outputs.observe(length)
        observed.append(length)
        generated, most = rng.randrange(200), rng.randrange(1, 400)
        if generated >= most or len(observed) < 16:
            continue
        longer = sorted(length for length in observed[-window:] if length > generated)
        expected = outputs.expected(generated, most)
        assert generated < expected <= most
        if not longer:
            assert expected == most
        elif expected < most:
            assert sum(length <= expected for length in longer) >= 0.8 * len(longer)
            assert sum(length < expected for length in longer) <= 0.8 * len(longer)
        else:
            assert sum(length < most for length in longer) <= 0.8 * len(longer)
