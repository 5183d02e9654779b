"""What steps cost, learnt from steps."""

import pytest

from caravan_scheduler.shard.costs import ShardCosts

DECODES_S = 0.03
TOKEN_S = 0.004


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
