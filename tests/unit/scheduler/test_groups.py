"""Items in groups that are small enough."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.core.groups import Most, grouped


def test_a_group_ends_where_the_next_item_would_be_too_much() -> None:
    most = Most(items=3, size=10)
    assert list(grouped(["aaaa", "bbbb", "ccc", "d", "e", "f", "g" * 11, "h"], most, len)) == [
        ["aaaa", "bbbb"],
        ["ccc", "d", "e"],
        ["f"],
        ["g" * 11],
        ["h"],
    ]
    assert list(grouped([], most, len)) == []


@given(st.lists(st.integers(0, 12)), st.integers(1, 4), st.integers(1, 10))
def test_groups_keep_the_order_and_no_group_could_have_had_the_next_item(
    sizes: list[int], items: int, size: int
) -> None:
    groups = list(grouped(sizes, Most(items=items, size=size), int))
    assert [item for group in groups for item in group] == sizes
    assert all(group and (len(group) == 1 or (len(group) <= items and sum(group) <= size)) for group in groups)
    for group, following in pairwise(groups):
        assert len(group) == items or sum(group) + following[0] > size
