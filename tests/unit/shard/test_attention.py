"""Which attention is chosen from measured steps, and when nothing is measured."""

from unittest.mock import Mock

import pytest

from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.attention import is_worth_leaving, step_seconds


@pytest.mark.parametrize(
    ("with_ms", "without_ms", "leave"), [(20.5, 11.8, True), (20.3, 20.8, False), (20, 19.5, False)]
)
def test_flash_attention_is_left_only_for_what_is_clearly_faster(
    with_ms: float, without_ms: float, leave: bool
) -> None:
    assert is_worth_leaving(with_ms / 1e3, without_ms / 1e3) is leave


def test_a_step_is_measured_behind_many_tokens_that_leave_room_for_it() -> None:
    for longest, context in ((3072, 512), (256, 253)):
        positions: list[int] = []

        def decode(batch: TokenBatch, positions: list[int] = positions) -> DecodeOutcome:
            positions.extend(batch.positions.tolist())
            return DecodeOutcome.OK

        memory = Mock()
        seconds = step_seconds(decode, memory, longest)
        assert seconds is not None
        assert 0 <= seconds < 1
        memory.fill_cells.assert_called_once_with(0, context)
        memory.clear.assert_called_once_with()
        assert positions == [0, *range(context, context + 3)]


def test_what_cannot_be_measured_is_not() -> None:
    memory = Mock()
    assert step_seconds(lambda _batch: DecodeOutcome.FAILED, memory, 1024) is None
    memory.clear.assert_called_once_with()
    memory.fill_cells.return_value = False
    assert step_seconds(lambda _batch: DecodeOutcome.OK, memory, 1024) is None
    outcomes = iter([DecodeOutcome.OK, DecodeOutcome.OK, DecodeOutcome.NO_KV])
    memory.fill_cells.return_value = True
    assert step_seconds(lambda _batch: next(outcomes), memory, 1024) is None
