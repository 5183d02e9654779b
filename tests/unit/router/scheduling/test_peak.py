from hypothesis import example, given
from hypothesis import strategies as st

from caravan_router.scheduling.planning.peak import peak_cells

ENTRY = st.tuples(st.integers(0, 60), st.integers(0, 40))
ENTRIES = st.lists(ENTRY, max_size=12)


def simulated_peak(entries: list[tuple[int, int]]) -> int:
    """Step by step: each still there takes a cell, then those that took their last free all they hold."""
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


def test_none_need_nothing() -> None:
    assert peak_cells([]) == 0


def test_one_needs_all_it_will_hold() -> None:
    assert peak_cells([(10, 5)]) == 15


def test_those_that_end_early_make_room_for_those_that_do_not() -> None:
    assert peak_cells([(10, 5), (3, 100)]) == 103
    assert peak_cells([(100, 5), (3, 100)]) == 113, "less than the 208 of each one's most"


@given(entries=ENTRIES)
@example(entries=[(5, 0), (7, 0)])
def test_as_simulated_step_by_step(entries: list[tuple[int, int]]) -> None:
    assert peak_cells(entries) == simulated_peak(entries)


@given(entries=ENTRIES, entry=ENTRY)
def test_one_more_never_needs_less(entries: list[tuple[int, int]], entry: tuple[int, int]) -> None:
    assert peak_cells([entry, *entries]) >= max(peak_cells(entries), sum(entry))
