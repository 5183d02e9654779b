import pytest

from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.planning.chunking import MIN_CHUNK_TOKENS, chunk_budget, pass_seconds
from caravan_router.scheduling.shard.step_cost import StepCost


def test_it_knows_nothing_before_the_first_chunk() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    assert cost.tokens_within(1.0) is None


def test_it_tells_decodes_from_chunks() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.observe_decode(0.02)
    cost.observe_chunk(100, 0.02 + 0.5)
    assert cost.tokens_within(0.27) in (49, 50)
    assert cost.tokens_within(0.01) == 0


def test_it_follows_a_cost_that_grows_with_the_context() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    token_s, tokens = 0.003, 32
    for _ in range(40):
        cost.observe_chunk(tokens, 0.02 + token_s * tokens)
        token_s *= 1.03
        tokens = cost.tokens_within(0.2) or 0
        assert 0.02 + token_s * tokens < 0.22


def test_without_decodes_all_is_the_chunks() -> None:
    cost = StepCost()
    cost.observe_chunk(200, 1.0)
    assert cost.tokens_within(0.5) in (99, 100)


def test_a_pass_that_measures_faster_with_a_chunk_does_not_divide_by_nothing() -> None:
    cost = StepCost()
    cost.observe_decode(0.02)
    cost.observe_chunk(16, 0.019)
    within = cost.tokens_within(0.2)
    assert within is not None
    assert within > 1000


def test_the_budget_is_whole_tiles_and_never_nothing() -> None:
    config = SchedulerConfig(max_batch_prefill_tokens=100)
    assert chunk_budget(config, tokens_within_target=0, riders=8) == MIN_CHUNK_TOKENS
    assert chunk_budget(config, tokens_within_target=70, riders=4) == 64
    assert chunk_budget(config, tokens_within_target=10_000, riders=0) == 100
    assert chunk_budget(config, tokens_within_target=None, riders=0) >= MIN_CHUNK_TOKENS


def test_a_pass_is_stretched_as_prompts_outnumber_the_decodes_in_it() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0)
    assert pass_seconds(config, prompts=1, riders=4) == 0.2
    assert pass_seconds(config, prompts=4, riders=4) == 0.2
    assert pass_seconds(config, prompts=6, riders=4) == pytest.approx(0.3)
    assert pass_seconds(config, prompts=7, riders=1) == 1.0, "bounded as a pass without decodes is"
    assert pass_seconds(config, prompts=7, riders=0) == 1.0
