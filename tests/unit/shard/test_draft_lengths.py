"""How many draft tokens a step has: what it costs, how often drafts are right, and what is best for all sequences."""

import random
from collections.abc import Callable

import pytest

from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import Drafting
from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance, SequenceAcceptance
from caravan_shard.speculation.step_costs import StepCosts, best_lengths, gains
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_output


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
    assert costs.seconds(8) == pytest.approx(0.12)
    assert costs.seconds(1) == pytest.approx(0.05)
    costs.observe(8, 0.2)
    assert costs.seconds(6) == pytest.approx(0.14)
    assert costs.seconds(20) == pytest.approx(0.4)


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
    (best,) = best_lengths([sure(probability)], 8, costs_of(cpu))
    assert abs(best - length) <= 1
    assert (best == 0) == (length == 0)


def test_many_sequences_on_a_processor_have_no_drafts() -> None:
    assert best_lengths([sure(0.9)] * 8, 16, costs_of(cpu)) == [0] * 8


def test_one_that_copies_is_not_fed_at_the_cost_of_its_neighbours() -> None:
    lengths = best_lengths([sure(0.95), [], [], []], 8, costs_of(cpu))
    assert lengths in ([0, 0, 0, 0], [1, 0, 0, 0])
    flat = best_lengths([sure(0.95), [], [], []], 8, costs_of(lambda tokens: 0.01 + 0.00001 * tokens))
    assert flat == [8, 0, 0, 0]


def test_a_step_stays_below_the_next_kernel_or_goes_far_beyond_it() -> None:
    assert best_lengths([sure(0.9, 16)], 16, costs_of(gpu)) == [7]
    assert sum(best_lengths([sure(0.99, 16)] * 2, 32, costs_of(gpu))) == 6


def test_the_draft_tokens_that_gain_most_come_first() -> None:
    free = costs_of(lambda _: 0.01)
    assert best_lengths([sure(0.2), sure(0.95)], 3, free) == [0, 3]
    # A third token of the second sequence gains less than the first of the other.
    assert best_lengths([sure(0.5), sure(0.95)], 3, free) == [1, 2]


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
    first, following = kinds.shares[DraftKind.CONTEXT_3]
    acceptance.watch(Draft([1, 2, 3], DraftKind.CONTEXT_3))
    acceptance.observe([1])
    acceptance.watch(Draft([5], DraftKind.CONTEXT_3))
    acceptance.observe([9, 5])
    assert kinds.shares[DraftKind.CONTEXT_3][0] > first, "the second draft was not watched"
    assert kinds.shares[DraftKind.CONTEXT_3][1] < following


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
