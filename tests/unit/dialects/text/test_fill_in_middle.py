from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.api.generation.fill import Gap, fill_prompt, trimmed
from caravan_proto.messages.model import FillTokens

FILL = FillTokens(prefix=-1, suffix=-2, middle=-3)
TOKENS = st.lists(st.integers(0, 9), max_size=20)


@pytest.mark.parametrize(("begin", "prompt"), [(None, (7, -1, 1, 2, -2, 3, -3)), (-4, (-4, 7, -1, 1, 2, -2, 3, -3))])
def test_the_order_of_a_prompt(begin: int | None, prompt: tuple[int, ...]) -> None:
    fill = FillTokens(prefix=-1, suffix=-2, middle=-3, begin=begin)
    assert fill_prompt(fill, Gap(before=(1, 2), after=(3,), context=(7,))) == prompt


@given(before=TOKENS, after=TOKENS, context=TOKENS, limit=st.integers(3, 70))
def test_what_is_left_is_next_to_the_gap_and_fills_the_room(
    before: Sequence[int], after: Sequence[int], context: Sequence[int], limit: int
) -> None:
    gap = Gap(before=before, after=after, context=context)
    left = trimmed(FILL, gap, limit)
    assert list(before[len(before) - len(left.before) :]) == list(left.before)
    assert list(after[: len(left.after)]) == list(left.after)
    assert list(context[len(context) - len(left.context) :]) == list(left.context)
    assert len(fill_prompt(FILL, left)) == min(limit, len(fill_prompt(FILL, gap)))
    # Context goes before text does, and the text before the gap keeps three quarters of the room.
    if left.context:
        assert (left.before, left.after) == (before, after)
    if len(left.after) < len(after):
        assert len(left.after) >= (limit - 3) // 4
    if len(left.before) < len(before):
        assert len(left.before) >= (limit - 3) - (limit - 3) // 4
