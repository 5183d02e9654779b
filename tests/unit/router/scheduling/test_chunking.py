"""How many prompt tokens a step computes, and how long it may take."""

import pytest

from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.planning.chunking import MIN_CHUNK_TOKENS, chunk_budget, step_seconds


def test_the_budget_is_whole_tiles_and_never_zero() -> None:
    config = SchedulerConfig(max_batch_prefill_tokens=100)
    assert chunk_budget(config, tokens_within_target=0, riders=8) == MIN_CHUNK_TOKENS
    assert chunk_budget(config, tokens_within_target=70, riders=4) == 64
    assert chunk_budget(config, tokens_within_target=10_000, riders=0) == 100
    assert chunk_budget(config, tokens_within_target=None, riders=0) >= MIN_CHUNK_TOKENS


def test_a_step_is_stretched_as_prompts_outnumber_its_decodes() -> None:
    config = SchedulerConfig(target_itl_s=0.2, idle_step_s=1.0)
    assert step_seconds(config, prompts=1, riders=4) == 0.2
    assert step_seconds(config, prompts=4, riders=4) == 0.2
    assert step_seconds(config, prompts=6, riders=4) == pytest.approx(0.3)
    assert step_seconds(config, prompts=7, riders=1) == 1.0, "bounded as a step without decodes is"
    assert step_seconds(config, prompts=7, riders=0) == 1.0
