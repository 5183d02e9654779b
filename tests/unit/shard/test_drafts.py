"""What is proposed as drafts, and how many draft tokens a step has."""

import random
from collections.abc import Callable

import pytest

from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import Drafting
from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.drafter import Context, Drafter, EndedTexts, PredictionFollower
from caravan_shard.speculation.step_costs import StepCosts, best_lengths, gains
from caravan_shard.speculation.token_text import TokenText, as_bytes
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_output

PROMPT = list(range(100, 120))
OUTPUT = list(range(200, 230))


def costs_of(seconds: Callable[[int], float], most: int = 40) -> StepCosts:
    costs = StepCosts()
    for tokens in range(1, most + 1):
        costs.observe(tokens, seconds(tokens))
    return costs


def cpu(tokens: int) -> float:
    """A processor: 6 ms for the weights and 8 ms for each token."""
    return 0.006 + 0.008 * tokens


def gpu(tokens: int) -> float:
    """A GPU, whose kernels take up to eight tokens at a time."""
    return 0.01 + 0.0002 * tokens + 0.03 * (tokens > 8)


def sure(probability: float, count: int = 8) -> list[float]:
    return [probability**place for place in range(1, count + 1)]


def test_unknown_sizes_are_guessed_from_the_nearest_known() -> None:
    costs = StepCosts()
    costs.observe(4, 0.08)
    assert costs.seconds(8) == pytest.approx(0.08 * 72 / 68)
    assert costs.seconds(1) == pytest.approx(0.08 * 65 / 68)
    costs.observe(8, 0.16)
    assert costs.seconds(6) == pytest.approx(0.12)
    assert costs.seconds(16) == pytest.approx(0.16 * 80 / 72)


def test_a_size_that_was_measured_once_is_forgotten() -> None:
    """Its step may have been disturbed, and no other would show that."""
    costs = StepCosts()
    for _ in range(4):
        costs.observe(1, 0.01)
    costs.observe(8, 0.5)
    disturbed = costs.seconds(8)
    for _ in range(600):
        costs.observe(1, 0.01)
    assert disturbed > 0.02
    assert costs.seconds(8) == pytest.approx(0.01 * 72 / 65)


def test_costs_follow_the_machine_and_survive_a_disturbance() -> None:
    costs = StepCosts()
    for _ in range(20):
        for tokens in (2, 4, 8):
            costs.observe(tokens, cpu(tokens))
    costs.observe(4, 10.0)
    assert costs.seconds(4) < 1.2 * cpu(4)
    costs.observe(80, 10.0)
    assert costs.seconds(80) < 3 * cpu(80)
    for _ in range(300):
        costs.observe(2, 2 * cpu(2))
    assert costs.seconds(2) == pytest.approx(2 * cpu(2), rel=0.05)
    assert costs.seconds(8) > 1.3 * cpu(8), "what slows a step down slows all down"


def test_each_further_token_gains_less() -> None:
    found = gains(sure(0.9))
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(("probability", "length"), [(0.5, 0), (0.6, 1), (0.95, 4)])
def test_a_lone_sequence_on_a_processor(probability: float, length: int) -> None:
    (best,) = best_lengths([sure(probability)], 8, costs_of(cpu).seconds)
    assert abs(best - length) <= 1
    assert (best == 0) == (length == 0)


def test_many_sequences_on_a_processor_have_no_drafts() -> None:
    assert best_lengths([sure(0.9)] * 8, 16, costs_of(cpu).seconds) == [0] * 8


def test_one_that_copies_is_not_fed_at_the_cost_of_its_neighbours() -> None:
    lengths = best_lengths([sure(0.95), [], [], []], 8, costs_of(cpu).seconds)
    assert lengths in ([0, 0, 0, 0], [1, 0, 0, 0])
    flat = best_lengths([sure(0.95), [], [], []], 8, costs_of(lambda tokens: 0.01 + 0.00001 * tokens).seconds)
    assert flat == [8, 0, 0, 0]


def test_a_step_stays_below_the_next_kernel_or_goes_far_beyond_it() -> None:
    assert best_lengths([sure(0.9, 16)], 16, costs_of(gpu).seconds) == [7]
    assert sum(best_lengths([sure(0.99, 16)] * 2, 32, costs_of(gpu).seconds)) == 6


def test_the_draft_tokens_that_gain_most_come_first() -> None:
    free = costs_of(lambda _: 0.01)
    assert best_lengths([sure(0.2), sure(0.95)], 3, free.seconds) == [0, 3]
    # A third token of the second sequence gains less than the first of the other.
    assert best_lengths([sure(0.5), sure(0.95)], 3, free.seconds) == [1, 2]


def test_what_is_seen_of_a_sequence_outweighs_what_is_seen_of_all() -> None:
    kinds = KindAcceptance()
    good, bad = SequenceAcceptance(kinds), SequenceAcceptance(kinds)
    draft = Draft([1, 2, 3], DraftKind.CONTEXT_5)
    for _ in range(10):
        good.watch(draft)
        good.observe([1, 2, 3])
        bad.watch(draft)
        bad.observe([9])
    assert good.survivals(draft)[0] > 0.8
    assert bad.survivals(draft)[0] < 0.35
    assert bad.most_probable < good.most_probable
    assert good.survivals(draft) == sorted(good.survivals(draft), reverse=True)


def test_a_draft_is_watched_over_several_steps() -> None:
    kinds = KindAcceptance()
    acceptance = SequenceAcceptance(kinds)
    first, following = kinds.probabilities[DraftKind.CONTEXT_3][:2]
    acceptance.watch(Draft([1, 2, 3], DraftKind.CONTEXT_3))
    acceptance.observe([1])
    acceptance.watch(Draft([5], DraftKind.CONTEXT_3))
    acceptance.observe([9, 5])
    assert kinds.probabilities[DraftKind.CONTEXT_3][0] > first, "the second draft was not watched"
    assert kinds.probabilities[DraftKind.CONTEXT_3][1] < following


class Clock:
    """The time as steps take it: ``step_s`` plus ``token_s`` for each token, whatever else this machine does."""

    def __init__(self, patch: pytest.MonkeyPatch, *, step_s: float = 0.0, token_s: float = 0.0) -> None:
        self._now_ns = 0
        self._step_s, self._token_s = step_s, token_s
        for module in ("caravan_shard.engine.engine", "caravan_testing.shard_builders"):
            patch.setattr(f"{module}.perf_counter_ns", lambda: self._now_ns)

    def step(self, batch: TokenBatch) -> None:
        """Let a step pass: a hook of the toy backend."""
        self._now_ns += int(1e9 * (self._step_s + self._token_s * len(batch.tokens)))


def decoded(predicted: tuple[int, ...], clock: Clock, sequences: int = 1) -> tuple[int, int]:
    """Return the number of steps and of draft tokens of 200 tokens with Caravan's own rule."""
    driver = EngineDriver(ToyBackend(hook=clock.step), drafting=Drafting())
    prompt = toy_prompt("learn what it costs")
    expected = expected_output(prompt, 200, ignore_eos=True)
    chunks = [first_chunk(0, prompt, max_new=200, ignore_eos=True)]
    chunks += [first_chunk(key, toy_prompt(f"{key}"), max_new=200, ignore_eos=True) for key in range(1, sequences)]
    driver.prefill(with_parameters(chunks[0], max_draft_tokens=8, prediction=predicted), *chunks[1:])
    results = driver.decode(list(range(sequences)), max_draft_tokens=8)
    assert driver.output[0] == expected
    return len(results), sum(sum(one.drafts.drafted) for one in results if one.drafts is not None)


def test_right_predictions_are_used_where_tokens_are_cheap_and_wrong_ones_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = tuple(expected_output(toy_prompt("learn what it costs"), 200, ignore_eos=True))
    steps, _ = decoded(expected, Clock(monkeypatch, step_s=0.002))
    assert steps < 60
    source = random.Random(1)
    wrong = tuple(source.randrange(32, 127) for _ in expected)
    steps, drafted = decoded(wrong, Clock(monkeypatch, step_s=0.002))
    assert drafted < 0.6 * 200


def test_drafts_are_given_up_where_tokens_are_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tuple(expected_output(toy_prompt("learn what it costs"), 200, ignore_eos=True))
    _, drafted = decoded(expected, Clock(monkeypatch, token_s=0.004), sequences=4)
    assert drafted < 90


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


def drafter(ended: EndedTexts, pool: bytes = b"mine") -> Drafter:
    return Drafter((), KindAcceptance(), ended, pool)


def test_the_output_of_an_equal_prompt_is_proposed_from_its_start() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    other = drafter(ended)
    assert other.propose(PROMPT, len(PROMPT), 4) == Draft(OUTPUT[:4], DraftKind.POOL_16)
    assert other.propose([7, *PROMPT[-8:]], 9, 4) == Draft(OUTPUT[:4], DraftKind.POOL_8)
    assert other.propose([7, *PROMPT[-7:]], 8, 4) is None
    assert other.propose(PROMPT + OUTPUT[:5], len(PROMPT), 4) == Draft(OUTPUT[5:9], DraftKind.POOL_16)


def test_no_other_pool_has_a_part_in_it() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    for pool in (b"theirs", b""):
        assert drafter(ended, pool).propose(PROMPT, len(PROMPT), 4) is None
    drafter(ended, b"").end(PROMPT + OUTPUT, len(PROMPT))
    assert len(ended) == len(PROMPT) + len(OUTPUT) + 1, "a sequence without a pool leaves nothing"


def test_what_matches_more_of_the_last_tokens_is_proposed() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    short = [*PROMPT[-5:], 1, 2, 3, *PROMPT]
    assert drafter(ended).propose(short, 0, 2) == Draft(OUTPUT[:2], DraftKind.POOL_16)
    equal = [*PROMPT[-16:], 1, 2, 3, *PROMPT]
    assert drafter(ended).propose(equal, 0, 2) == Draft([1, 2], DraftKind.CONTEXT_16)


def test_a_draft_ends_with_the_text() -> None:
    ended = EndedTexts()
    for output in (OUTPUT, OUTPUT[::-1]):
        drafter(ended).end(PROMPT + output, len(PROMPT))
    assert drafter(ended).propose(OUTPUT[:-2], 0, 8) == Draft(OUTPUT[-2:], DraftKind.POOL_16)
    assert drafter(ended).propose(OUTPUT, 0, 8) is None


def test_the_newest_of_equal_beginnings_is_proposed_and_equal_texts_are_kept_once() -> None:
    ended = EndedTexts()
    for output in (OUTPUT, [5, 6, 7], OUTPUT):
        drafter(ended).end(PROMPT + output, len(PROMPT))
    assert drafter(ended).propose(PROMPT, 0, 2) == Draft([5, 6], DraftKind.POOL_16)
    assert len(ended) == 2 * len(PROMPT) + len(OUTPUT) + 3 + 2


def test_a_prompt_without_output_is_not_kept() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT, len(PROMPT))
    assert len(ended) == 0


def test_old_texts_make_room_for_new_ones_of_their_pool_and_old_pools_for_others() -> None:
    ended = EndedTexts()
    for number in range(200):
        drafter(ended).end(list(range(1000 * number, 1000 * number + 200)), 100)
    assert 16_000 < len(ended) <= 16_384
    assert drafter(ended).propose(list(range(100, 120)), 0, 4) is None
    newest = 199_100
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) == Draft([newest + 20], DraftKind.POOL_16)
    for number in range(3):
        drafter(ended, b"%d" % number).end(list(range(20_000)), 10)
    assert len(ended) <= 4 * 16_384
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) is not None
    drafter(ended, b"last").end(PROMPT + OUTPUT, len(PROMPT))
    assert len(ended) <= 4 * 16_384
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) is None, "its pool has the oldest texts"
    assert drafter(ended, b"2").propose(list(range(19_000, 19_020)), 0, 1) == Draft([19_020], DraftKind.POOL_16)
