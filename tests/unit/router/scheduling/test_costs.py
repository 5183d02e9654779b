"""What steps cost, learnt from steps."""

from caravan_router.scheduling.shard.costs import StepCost


def test_the_cost_is_unknown_before_the_first_chunk() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    assert cost.tokens_within(1.0) is None


def test_decodes_and_chunks_are_told_apart() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe_decode(0.02)
    cost.observe_chunk(100, 0.02 + 0.5)
    assert cost.tokens_within(0.27) in (49, 50)
    assert cost.tokens_within(0.01) == 0


def test_the_model_follows_a_cost_that_grows_with_the_context() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    token_s, tokens = 0.003, 32
    for _ in range(40):
        cost.observe_chunk(tokens, 0.02 + token_s * tokens)
        token_s *= 1.03
        tokens = cost.tokens_within(0.2) or 0
        assert 0.02 + token_s * tokens < 0.22


def test_without_decodes_chunks_take_all_of_the_time() -> None:
    cost = StepCost()
    cost.observe_chunk(200, 1.0)
    assert cost.tokens_within(0.5) in (99, 100)


def test_a_step_that_measures_faster_with_a_chunk_does_not_divide_by_zero() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    cost.observe_chunk(16, 0.019)
    within = cost.tokens_within(0.2)
    assert within is not None
    assert within > 1000
