from caravan_router.scheduling.policy import MIN_CHUNK_TOKENS, SchedulerConfig, chunk_budget
from caravan_router.scheduling.step_cost import StepCost


def test_it_knows_nothing_before_the_first_pass() -> None:
    assert StepCost().tokens_within(1.0) is None


def test_it_learns_a_line() -> None:
    cost = StepCost()
    for tokens in (4, 36, 68, 36, 4, 132):
        cost.observe(tokens, 0.02 + 0.005 * tokens)
    assert cost.tokens_within(0.52) in (99, 100)
    assert cost.tokens_within(0.01) == 0


def test_passes_of_one_size_give_a_line_through_the_origin() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.observe(8, 0.08)
    assert cost.tokens_within(0.4) in (39, 40)


def test_it_forgets() -> None:
    cost = StepCost()
    for tokens in (10, 50) * 20:
        cost.observe(tokens, tokens * 0.01)
    for tokens in (10, 50) * 200:
        cost.observe(tokens, tokens * 0.001)
    assert cost.tokens_within(0.1) in (99, 100)


def test_noise_that_slopes_down_does_not_confuse_it() -> None:
    cost = StepCost()
    cost.observe(10, 0.2)
    cost.observe(50, 0.1)
    within = cost.tokens_within(0.15)
    assert within is not None
    assert 20 <= within <= 40


def test_the_budget_is_whole_tiles_and_never_nothing() -> None:
    config = SchedulerConfig(max_batch_prefill_tokens=100)
    assert chunk_budget(config, tokens_within_target=0, riders=8) == MIN_CHUNK_TOKENS
    assert chunk_budget(config, tokens_within_target=70, riders=4) == 64
    assert chunk_budget(config, tokens_within_target=10_000, riders=0) == 100
    assert chunk_budget(config, tokens_within_target=None, riders=0) >= MIN_CHUNK_TOKENS
