"""What is proposed as drafts: the prediction where the output has got to, and repetitions of prompt and output."""

import pytest

from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance
from caravan_shard.speculation.drafter import Context, Drafter, EndedTexts, PredictionFollower
from caravan_shard.speculation.token_text import TokenText, as_bytes


def predicted(prediction: PredictionFollower, tokens: list[int], output_start: int, most: int) -> list[int]:
    """Return the tokens that ``prediction`` proposes."""
    draft = prediction.propose(tokens, output_start, most)
    return [] if draft is None else list(draft.tokens)


def repeated(tokens: list[int], most: int) -> list[int]:
    """Return the tokens that a new context proposes."""
    draft = Context().propose(tokens, most)
    return [] if draft is None else list(draft.tokens)


def test_tokens_are_found_at_whole_tokens_only() -> None:
    text = TokenText([1, 256, 2, 1, 256, 3])
    assert (len(text), text[4], text.tokens(2, 9)) == (6, 256, [2, 1, 256, 3])
    assert text.first_end(as_bytes([1, 256]), 0) == 2
    assert text.first_end(as_bytes([1, 256]), 1) == 5
    assert text.last_end(as_bytes([1, 256]), 6) == 5
    assert text.last_end(as_bytes([1, 256]), 4) == 2
    # The bytes 0, 1, 0, 0 are there, but they begin inside of tokens.
    assert TokenText([65536, 0]).first_end(as_bytes([256]), 0) is None
    assert TokenText([65536, 0]).last_end(as_bytes([256]), 2) is None


def test_the_prediction_is_proposed_from_its_start_and_then_behind_the_output() -> None:
    prediction = PredictionFollower([5, 6, 7, 8])
    assert predicted(prediction, [1, 2], 2, 3) == [5, 6, 7]
    assert predicted(prediction, [1, 2, 5, 6], 2, 8) == [7, 8]
    assert predicted(prediction, [1, 2, 5, 6, 7, 8], 2, 8) == []


def test_a_replaced_token_costs_only_itself() -> None:
    prediction = PredictionFollower([5, 6, 7, 8, 9])
    assert predicted(prediction, [5, 60], 0, 2) == [7, 8]
    assert predicted(prediction, [5, 60, 7], 0, 2) == [8, 9]


def test_the_output_is_found_again_behind_what_it_leaves_out_or_adds() -> None:
    expected = list(range(100, 120))
    left_out = PredictionFollower(expected)
    assert predicted(left_out, [100, 101, 110, 111], 0, 2) == [112, 113]
    added = PredictionFollower(expected)
    assert predicted(added, [100, 101, 7, 8, 102, 103], 0, 2) == [104, 105]
    back = PredictionFollower(expected)
    assert predicted(back, [110, 111, 100, 101], 0, 2) == [102, 103]


def test_a_wrong_prediction_is_given_up_until_the_output_has_a_part_of_it() -> None:
    prediction = PredictionFollower(list(range(100, 120)))
    assert predicted(prediction, [1, 2, 3], 0, 4) == []
    assert predicted(prediction, [1, 2, 3, 104, 105], 0, 3) == [106, 107, 108]


def test_an_interrupted_output_is_followed_again() -> None:
    expected = list(range(100, 120))
    step_by_step, at_once = PredictionFollower(expected), PredictionFollower(expected)
    output = [100, 101, 9, 103, 104, 110, 111]
    for end in range(len(output)):
        predicted(step_by_step, output[:end], 0, 1)
    assert predicted(step_by_step, output, 0, 4) == predicted(at_once, output, 0, 4) == [112, 113, 114, 115]


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert repeated([1, 2, 3, 4, 5, 9, 1, 2, 3], 3) == [4, 5, 9]
    assert repeated([1, 2, 3, 4, 5, 9, 2, 3], 3) == []


def test_the_longest_tail_wins_and_then_the_last_occurrence() -> None:
    tail = [1, 2, 3, 4, 5]
    tokens = [*tail, 60, 3, 4, 5, 70, *tail]
    assert repeated(tokens, 1) == [60]
    assert repeated([3, 4, 5, 70, 3, 4, 5, 80, 3, 4, 5], 1) == [80]


def test_a_repetition_close_to_the_end_repeats_itself() -> None:
    assert repeated([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert repeated([7, 7, 7, 7], 3) == [7, 7, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3]])
def test_short_sequences_have_no_drafts(tokens: list[int]) -> None:
    assert repeated(tokens, 4) == []


def test_a_context_reads_only_what_is_new() -> None:
    context = Context()
    tokens = [1, 2, 3, 4, 1, 2, 3]
    assert [context.propose(tokens[:end], 1) for end in (5, 6, 7)] == [None, None, Draft([4], DraftKind.CONTEXT_3)]


def test_the_prediction_comes_before_the_context() -> None:
    kinds = KindAcceptance()
    drafter = Drafter([8], kinds, EndedTexts(), b"")
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3], 7, 2) == Draft([8], DraftKind.PREDICTION)
    assert drafter.propose([1, 2, 3, 4, 1, 2, 3, 8], 7, 2) is None
    assert Drafter((), kinds, EndedTexts(), b"").propose([1, 2, 3, 4, 1, 2, 3], 7, 1) == Draft([4], DraftKind.CONTEXT_3)


def test_a_prediction_that_was_left_is_another_kind() -> None:
    prediction = PredictionFollower([5, 6, 7, 8])
    assert prediction.propose([5, 60], 0, 1) == Draft([7], DraftKind.PREDICTION_LOST)
    assert prediction.propose([5, 60, 7], 0, 1) == Draft([8], DraftKind.PREDICTION)


def test_a_longer_repetition_is_another_kind() -> None:
    text = list(range(20))
    for count, kind in ((3, DraftKind.CONTEXT_3), (7, DraftKind.CONTEXT_5), (17, DraftKind.CONTEXT_16)):
        assert Context().propose([*text, 99, *text[-count - 1 : -1]], 1) == Draft([19], kind)
