"""Which tokens of a step share a call of llama.cpp."""

import numpy as np

from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.calls import DecodeCall, has_single_tokens, split_calls


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


def places(call: DecodeCall) -> list[tuple[int, int]]:
    return list(zip(call.batch.sequence_ids.tolist(), call.batch.tokens.tolist(), strict=True))


def test_a_step_of_single_tokens_or_of_one_sequence_is_one_call() -> None:
    for whole in (batch((0, 1), (3, 1), (4, 1)), batch((2, 7)), batch((2, 1))):
        (call,) = split_calls(whole, 64)
        assert call.batch.tokens.tolist() == whole.tokens.tolist()
        assert call.rows.all()


def test_only_a_step_without_chunks_has_single_tokens() -> None:
    assert has_single_tokens(batch((2, 1)))
    assert has_single_tokens(batch((0, 1), (3, 1), (4, 1)))
    assert not has_single_tokens(batch((2, 7)))
    assert not has_single_tokens(batch((0, 1), (3, 2), (4, 1)))
    assert not has_single_tokens(batch((0, 1), (3, 1), (4, 2)))


def test_chunks_have_calls_of_their_own_and_single_tokens_one_together() -> None:
    calls = split_calls(batch((0, 1), (1, 3), (2, 1), (5, 2)), 64)
    assert [places(call) for call in calls] == [[(0, 0), (2, 4)], [(5, 5), (5, 6)], [(1, 1), (1, 2), (1, 3)]]
    assert [call.batch.positions.tolist() for call in calls] == [[100, 104], [105, 106], [101, 102, 103]]
    assert [call.batch.outputs.tolist() for call in calls] == [[1, 1], [0, 1], [0, 0, 1]]
    assert {call.batch.adapter for call in calls} == {"poet"}
    # Outputs in the order of the batch: sequences 0, 1, 2, 5.
    assert [call.rows.tolist() for call in calls] == [
        [True, False, True, False],
        [False, False, False, True],
        [False, True, False, False],
    ]


def test_chunks_alone_are_parted_too() -> None:
    assert [places(call) for call in split_calls(batch((1, 2), (2, 3)), 64)] == [
        [(1, 0), (1, 1)],
        [(2, 2), (2, 3), (2, 4)],
    ]


def test_chunks_of_one_size_share_calls_as_far_as_an_ubatch_has_room() -> None:
    calls = split_calls(batch((0, 2), (1, 3), (2, 2), (3, 1), (4, 2), (5, 3)), 5)
    assert [sorted({key for key, _ in places(call)}) for call in calls] == [[3], [0, 2], [4], [1], [5]]
    assert places(calls[1]) == [(0, 0), (0, 1), (2, 5), (2, 6)]
    assert calls[1].batch.outputs.tolist() == [0, 1, 0, 1]
    assert calls[1].rows.tolist() == [True, False, True, False, False, False]


def test_no_ubatch_has_a_single_token_of_a_chunk() -> None:
    for length, sizes in ((8, [8]), (9, [7, 2]), (10, [10]), (17, [15, 2])):
        calls = split_calls(batch((3, length)), 8)
        assert [len(call.batch.tokens) for call in calls] == sizes
        assert [token for call in calls for _, token in places(call)] == list(range(length))
        assert [call.rows.tolist() for call in calls] == [[False]] * (len(calls) - 1) + [[True]]
    # Beside a decode, and with two outputs, as for prompt log probabilities.
    whole = batch((0, 1), (3, 9))
    whole.outputs[1] = 1
    calls = split_calls(whole, 8)
    assert [len(call.batch.tokens) for call in calls] == [1, 7, 2]
    assert [call.rows.tolist() for call in calls] == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
    ]
