"""What steps and copies of a shard take: what is learnt, and the curve that has it by size."""

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.shard.cost_curve import CostCurve
from caravan_scheduler.shard.costs import ShardCosts

DECODES_S = 0.03
TOKEN_S = 0.004


SIZES = st.integers(1, 20_000)
SECONDS = st.floats(-0.01, 10.0)


def learnt(*, context: int = 0) -> ShardCosts:
    """Return costs that know steps of four decodes, and chunks of 32 tokens beside them."""
    costs = ShardCosts()
    for _ in range(20):
        costs.observe_decodes(4, DECODES_S)
        costs.observe_chunks(32, context, riders=4, seconds=DECODES_S + 32 * TOKEN_S)
    return costs


def test_the_first_chunk_is_small_and_smaller_beside_decodes() -> None:
    costs = ShardCosts()
    costs.observe_decodes(4, DECODES_S)
    assert costs.tokens_within(10.0, riders=0, context=0) == 128
    assert costs.tokens_within(10.0, riders=4, context=0) == 32


def test_decodes_and_chunks_have_costs_of_their_own() -> None:
    costs = learnt()
    assert costs.decode_s(4) == pytest.approx(DECODES_S)
    assert costs.tokens_within(DECODES_S + 40 * TOKEN_S, riders=4, context=0) in (39, 40)
    assert costs.tokens_within(DECODES_S / 2, riders=4, context=0) == 0


def test_decodes_cost_what_their_number_costs() -> None:
    costs = ShardCosts()
    for _ in range(10):
        costs.observe_decodes(1, 0.014)
        costs.observe_decodes(8, 0.045)
    assert costs.decode_s(1) == pytest.approx(0.014)
    assert 0.014 < costs.decode_s(4) < 0.045
    assert costs.decode_s(8) == pytest.approx(0.045, rel=0.05)


def test_the_first_chunk_beside_decodes_costs_at_most_what_it_costs_alone() -> None:
    costs = ShardCosts()
    costs.observe_chunks(256, 0, riders=0, seconds=256 * TOKEN_S)
    costs.observe_decodes(4, DECODES_S)
    assert costs.tokens_within(DECODES_S + 24 * TOKEN_S, riders=4, context=0) in (23, 24)


def test_a_chunk_is_at_most_four_times_the_largest_that_was_measured() -> None:
    costs = ShardCosts()
    costs.observe_chunks(16, 0, riders=1, seconds=1e-6)
    assert costs.tokens_within(1.0, riders=1, context=0) == 64, "what 16 tokens took says nothing of 4096"
    costs.observe_chunks(64, 0, riders=1, seconds=1e-6)
    assert costs.tokens_within(1.0, riders=1, context=0) == 256


def test_chunks_of_a_token_teach_nothing_about_large_ones() -> None:
    """Prompts that are in the cache are computed from their last token on: its cost is lost in that of the decodes."""
    costs = learnt()
    for _ in range(20):
        costs.observe_chunks(1, 300, riders=4, seconds=0.8 * DECODES_S)
    expected = DECODES_S + 48 * TOKEN_S
    assert 40 <= costs.tokens_within(expected, riders=4, context=0) <= 56


def test_attention_is_learnt_from_one_prompt_and_holds_for_the_next() -> None:
    costs, pair_s = ShardCosts(), 2e-6
    costs.observe_decodes(4, DECODES_S)

    def seconds(tokens: int, context: int) -> float:
        return DECODES_S + tokens * (TOKEN_S + pair_s * context)

    for context in range(0, 2000, 32):
        costs.observe_chunks(32, context, riders=4, seconds=seconds(32, context))
    for context in (0, 1000, 4000):
        tokens = costs.tokens_within(0.22, riders=4, context=context)
        assert 0.19 < seconds(tokens, context) < 0.23


def test_the_model_follows_a_cost_that_grows_from_step_to_step() -> None:
    costs = ShardCosts()
    costs.observe_decodes(1, 0.02)
    token_s, tokens = 0.003, 32
    for _ in range(40):
        costs.observe_chunks(tokens, 0, riders=1, seconds=0.02 + token_s * tokens)
        token_s *= 1.03
        tokens = costs.tokens_within(0.2, riders=1, context=0)
        assert 0.02 + token_s * tokens < 0.24


def test_a_step_that_measures_faster_with_a_chunk_lets_no_chunk_be_free() -> None:
    costs = ShardCosts()
    costs.observe_decodes(1, 0.02)
    costs.observe_chunks(16, 0, riders=1, seconds=0.019)
    assert costs.tokens_within(0.2, riders=1, context=0) == 64
    assert costs.recompute_token_s > 0


def test_computing_again_costs_what_chunks_cost() -> None:
    assert ShardCosts().recompute_token_s > 0
    assert learnt().recompute_token_s == pytest.approx(TOKEN_S, rel=0.1)


def test_each_layout_has_costs_of_its_own_of_which_the_second_start_as_a_guess() -> None:
    costs = ShardCosts()
    for _ in range(40):
        costs.observe_decodes(4, DECODES_S)
        costs.observe_chunks(64, 0, riders=4, seconds=DECODES_S + 64 * TOKEN_S)
    known_s = costs.seconds(64, riders=4, context=0)
    assert costs.doubt(64, riders=4) == 0.0
    costs.change_layout()
    assert costs.seconds(64, riders=4, context=0) == known_s
    assert costs.doubt(64, riders=4) == 1.0
    costs.observe_chunks(64, 0, riders=4, seconds=2 * known_s)
    assert costs.seconds(64, riders=4, context=0) == pytest.approx(2 * known_s), "the level is believed at once"
    costs.change_layout()
    assert costs.seconds(64, riders=4, context=0) == known_s
    assert costs.doubt(64, riders=4) == 0.0


def curve(*, newest: float = 0.3, fixed: float = 0.0) -> CostCurve:
    return CostCurve(newest=newest, fixed=fixed)


def test_nothing_is_known_at_first() -> None:
    made = curve()
    assert not made.is_known
    assert made.seconds(16) == 0.0
    assert made.size_within(1.0) == 0


def test_the_first_measurement_is_taken_as_it_is_and_drawn_in_proportion() -> None:
    made = curve()
    made.observe(40, 0.2)
    for size in (1, 40, 100, 5000, 20_000):
        assert made.seconds(size) == pytest.approx(size * 0.005)
    decodes = curve(fixed=4.0)
    decodes.observe(4, 0.04)
    assert decodes.seconds(1) == pytest.approx(0.025)


def test_each_size_is_learnt_apart_and_sizes_between_are_interpolated() -> None:
    made = curve()
    for _ in range(40):
        made.observe(16, 0.1)
        made.observe(64, 0.2)
        made.observe(256, 1.0)
    assert made.seconds(16) == pytest.approx(0.1, rel=0.01)
    assert made.seconds(64) == pytest.approx(0.2, rel=0.01)
    assert made.seconds(192) == pytest.approx((made.seconds(128) + 1.0) / 2, rel=0.01)


def test_a_size_between_two_is_learnt_too() -> None:
    made = curve()
    made.observe(16, 0.016)
    for _ in range(40):
        made.observe(48, 0.3)
    assert made.seconds(48) == pytest.approx(0.3, rel=0.01)


def test_one_measurement_moves_the_curve_by_a_part() -> None:
    made = curve(newest=0.25)
    made.observe(32, 0.1)
    made.observe(32, 0.2)
    assert made.seconds(32) == pytest.approx(0.125)


def test_a_disturbed_measurement_counts_as_three_times_the_expected_one() -> None:
    made = curve(newest=0.5)
    made.observe(32, 0.1)
    made.observe(32, 50.0)
    assert made.seconds(32) == pytest.approx(0.2)


def test_sizes_that_are_not_measured_follow_in_the_end() -> None:
    made = curve()
    for _ in range(10):
        made.observe(16, 0.1)
        made.observe(256, 1.0)
    made.observe(16, 0.2)
    assert made.seconds(256) == pytest.approx(1.0, rel=0.02), "it was measured just now"
    for _ in range(200):
        made.observe(16, 0.1)
    for _ in range(200):
        made.observe(16, 0.2)
    assert made.seconds(256) == pytest.approx(2.0, rel=0.05), "the machine is half as fast as then"


def test_a_small_part_of_a_step_changes_little() -> None:
    made = curve()
    made.observe(64, 0.2)
    made.observe(1, 0.05, beside_s=1.0)
    assert made.seconds(64) == pytest.approx(0.2, rel=0.1)


def test_a_guess_from_another_curve_is_given_up_for_measurements() -> None:
    other, made = curve(), curve()
    other.observe(128, 1.28)
    made.guess_from(other)
    assert made.seconds(64) == pytest.approx(0.64)
    assert made.largest_measured == 128
    for _ in range(20):
        made.observe(64, 0.1)
    assert made.seconds(64) == pytest.approx(0.1, rel=0.01)
    assert made.seconds(128) < 0.3
    assert other.seconds(64) == pytest.approx(0.64)


@given(st.lists(st.tuples(SIZES, SECONDS, st.floats(0.0, 1.0)), min_size=1, max_size=40), SECONDS)
def test_it_never_falls_and_what_fits_is_within(measured: list[tuple[int, float, float]], seconds: float) -> None:
    made = curve()
    for size, taken, beside in measured:
        made.observe(size, taken, beside_s=beside)
    sizes = [*range(1, 70), 127, 128, 500, 8191, 8192, 8193, 30_000]
    assert all(0 < made.seconds(small) <= made.seconds(large) * (1 + 1e-9) for small, large in pairwise(sizes))
    fits = made.size_within(seconds)
    assert made.seconds(fits) <= max(0.0, seconds) * (1 + 1e-9)
    assert made.seconds(fits + 2) > seconds * (1 - 1e-9)
    assert made.size_within(seconds, 1e-3) <= fits


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 2, 3, 4, 5, 6, 7, 8),
        (4, 80),
        *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((20, 30, 40, 50, 60, 70, 80), (16, 64), (3, 5, 7))),
    ],
)
@pytest.mark.parametrize("spread", [pytest.param(0.3, marks=pytest.mark.slow), 0.8])
def test_errors_do_not_add_up_over_days(sizes: Sequence[int], spread: float) -> None:
    """A hundred thousand steps of a few sizes, with noise: all stay near the truth, and no other size runs away."""
    source = random.Random(f"{sizes} {spread}")
    made = CostCurve(newest=0.2, fixed=4.0)
    mean = math.exp(spread**2 / 2)
    for step in range(100_000):
        size = source.choice(sizes)
        made.observe(size, 1e-4 * (4 + size) * source.lognormvariate(0, spread))
        if step % 1_000 == 999:
            assert made.seconds(8192) < 100 * 1e-4 * 8192
    for size in sizes:
        assert 0.2 < made.seconds(size) / (1e-4 * (4 + size) * mean) < 3, size
