"""Which tokens of a step share a call of llama.cpp."""

import numpy as np

from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.calls import output_rows, split_calls


def batch(*sequences: tuple[int, int]) -> TokenBatch:
    """Make a batch of (sequence id, tokens); the last token of each has an output."""
    ids = [key for key, count in sequences for _ in range(count)]
    outputs = [int(place == count - 1) for _, count in sequences for place in range(count)]
    return TokenBatch(
        tokens=np.arange(len(ids), dtype=np.int32),
        positions=np.arange(len(ids), dtype=np.int32) + 100,
        sequence_ids=np.array(ids, np.int32),
        outputs=np.array(outputs, np.int8),
        adapter="poet",
    )


def test_a_step_of_single_tokens_or_of_one_sequence_is_one_call() -> None:
    for whole in (batch((0, 1), (3, 1), (4, 1)), batch((2, 7)), batch((2, 1))):
        assert split_calls(whole) == [whole]


def test_chunks_have_calls_of_their_own_and_single_tokens_one_together() -> None:
    whole = batch((0, 1), (1, 3), (2, 1), (5, 2))
    calls = split_calls(whole)
    assert [call.sequence_ids.tolist() for call in calls] == [[0, 2], [1, 1, 1], [5, 5]]
    assert [call.tokens.tolist() for call in calls] == [[0, 4], [1, 2, 3], [5, 6]]
    assert [call.positions.tolist() for call in calls] == [[100, 104], [101, 102, 103], [105, 106]]
    assert [call.outputs.tolist() for call in calls] == [[1, 1], [0, 0, 1], [0, 1]]
    assert {call.adapter for call in calls} == {"poet"}
    # Outputs in the order of the batch: sequences 0, 1, 2, 5.
    assert [output_rows(whole, call).tolist() for call in calls] == [
        [True, False, True, False],
        [False, True, False, False],
        [False, False, False, True],
    ]


def test_chunks_alone_are_parted_too() -> None:
    assert [call.sequence_ids.tolist() for call in split_calls(batch((1, 2), (2, 3)))] == [[1, 1], [2, 2, 2]]
