"""Drafts of a model that makes several tokens in a pass, on toy models: the same tokens in fewer passes."""

from typing import Any

import pytest

from caravan_proto.messages.commands import Chunk
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import Drafting
from caravan_shard.speculation.draft_plan import DraftCosts, Draftee, best_drafts, best_equal_drafts
from caravan_testing.seen_drafts import counts
from caravan_testing.shard_builders import (
    EngineDriver,
    ToyBlockModel,
    check_draft_cells,
    first_chunk,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_output

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.2, seed=5)


def drafted(sequence_id: int, prompt: list[int], most: int = 4, **fields: Any) -> Chunk:
    """Make a first chunk of a sequence that may have drafts."""
    return with_parameters(first_chunk(sequence_id, prompt, ignore_eos=True, **fields), max_draft_tokens=most)


def pair(draft_model: ToyBlockModel, **fields: Any) -> EngineDriver:
    return EngineDriver(ToyBackend(draft_model=draft_model, **fields))


@pytest.mark.parametrize("layout", list(KvLayout))
def test_a_pass_drafts_for_all_sequences(layout: KvLayout) -> None:
    prompts = [toy_prompt(f"number {key} of several") for key in range(3)]
    passes: list[int] = []
    draft_model = ToyBlockModel(hook=lambda batch: passes.append(int(batch.outputs.sum())))
    driver = pair(draft_model, layout=layout)
    driver.prefill(*(drafted(key, prompt) for key, prompt in enumerate(prompts)))
    passes.clear()
    results = driver.decode([0, 1, 2], max_draft_tokens=12)
    for key, prompt in enumerate(prompts):
        assert driver.output[key] == expected_output(prompt, 50, ignore_eos=True)
    right, accepted = counts(results)
    # The last draft is cut to what the sequence may still have.
    assert accepted == right
    assert len(results) <= 11
    assert max(passes) == 15
    assert sum(rows > 0 for rows in passes) <= len(results)
    check_draft_cells(driver, draft_model)


@pytest.mark.parametrize("wrong_every", [1, 2, 3])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_blocks_that_are_wrong_change_nothing(sampling: SamplingParams, wrong_every: int) -> None:
    prompts = [toy_prompt(f"{key} wrong") for key in range(3)]
    draft_model = ToyBlockModel(wrong_every=wrong_every)
    driver = pair(draft_model)
    driver.prefill(*(drafted(key, prompt, sampling=sampling) for key, prompt in enumerate(prompts)))
    right, accepted = counts(driver.decode([0, 1, 2], max_draft_tokens=16))
    for key, prompt in enumerate(prompts):
        assert driver.output[key] == expected_output(prompt, 50, sampling=sampling, ignore_eos=True)
    assert accepted < right
    check_draft_cells(driver, draft_model)


def test_blocks_that_do_not_fit_into_one_pass_take_several() -> None:
    prompts = [toy_prompt(f"{key}, and what comes after it") for key in range(5)]
    draft_model = ToyBlockModel(max_batch_tokens=12)
    driver = pair(draft_model)
    driver.prefill(*(drafted(key, prompt) for key, prompt in enumerate(prompts)))
    right, accepted = counts(driver.decode(list(range(5)), max_draft_tokens=20))
    assert accepted == right > 150
    for key, prompt in enumerate(prompts):
        assert driver.output[key] == expected_output(prompt, 50, ignore_eos=True)


@pytest.mark.parametrize("outcome", [DecodeOutcome.FAILED, DecodeOutcome.NO_KV])
def test_a_model_whose_passes_fail_is_given_up(outcome: DecodeOutcome) -> None:
    prompt = toy_prompt("fails")
    draft_model = ToyBlockModel()
    driver = pair(draft_model)
    driver.prefill(drafted(0, prompt))
    driver.decode([0], steps=3, max_draft_tokens=4)
    draft_model.hook = lambda batch: outcome if batch.outputs.any() else None
    driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 50, ignore_eos=True)
    assert draft_model.cache.used == 0


def test_without_room_for_a_block_there_are_no_drafts() -> None:
    driver = pair(ToyBlockModel(cells=64))
    prompt = toy_prompt("x" * 59)
    driver.prefill(drafted(0, prompt, max_new=8))
    assert counts(driver.decode([0], max_draft_tokens=4)) == (0, 0)
    assert driver.output[0] == expected_output(prompt, 8, ignore_eos=True)


def test_costs_of_blocks_and_of_reading_are_learnt_apart() -> None:
    driver = EngineDriver(ToyBackend(draft_model=ToyBlockModel()), drafting=Drafting())
    drafter = driver.engine._pool._drafter
    assert drafter is not None
    assert drafter.costs._sizes == [1]
    assert drafter.reading._sizes == [1]
    assert drafter.costs is not drafter.reading


def test_the_tokens_of_a_block_cost_one_pass() -> None:
    """Each saves a part of a step of 10 ms, and a pass takes 9: one does not pay, three do."""
    draftees = [Draftee((0.3, 0.25, 0.2), 1)]
    for find in (best_drafts, best_equal_drafts):
        blocks = DraftCosts(lambda _tokens: 0.01, lambda _size: 0.009, 3)
        plan = find(draftees, 1, 9, blocks)
        assert plan.lengths == [3]
        assert plan.value == pytest.approx(0.75 - 0.6418539)
        assert find(draftees, 1, 9, blocks._replace(at_once=1)).lengths == [0]
