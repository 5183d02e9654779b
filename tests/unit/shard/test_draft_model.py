"""Drafts of a draft model, on toy models: the same tokens in fewer steps, and only where that saves time."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from caravan_proto.messages.commands import Chunk, PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import Draftable, Drafting
from caravan_shard.speculation.step_costs import StepCosts
from caravan_testing.seen_drafts import counts
from caravan_testing.shard_builders import (
    EngineDriver,
    ToyDraftModel,
    check_draft_cells,
    first_chunk,
    toy_grammar,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_output

if TYPE_CHECKING:
    from caravan_shard.speculation.acceptance import Draft

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.2, seed=5)
HISTORICAL = SamplingParams(
    temperature=1.0, frequency_penalty=0.4, dry_multiplier=0.9, dry_allowed_length=1, xtc_probability=0.5, seed=3
)


def drafted(sequence_id: int, prompt: list[int], most: int = 4, **fields: Any) -> Chunk:
    """Make a first chunk of a sequence that may have drafts."""
    return with_parameters(first_chunk(sequence_id, prompt, ignore_eos=True, **fields), max_draft_tokens=most)


def pair(draft_model: ToyDraftModel, **fields: Any) -> EngineDriver:
    return EngineDriver(ToyBackend(draft_model=draft_model, **fields))


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_model_that_is_right_takes_fewer_steps(sampling: SamplingParams) -> None:
    prompt = toy_prompt("the prompt of a sequence whose tokens the draft model must read first")
    draft_model = ToyDraftModel()
    driver = pair(draft_model)
    driver.prefill(drafted(0, prompt, sampling=sampling))
    results = driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 50, sampling=sampling, ignore_eos=True)
    right, accepted = counts(results)
    # Penalties of a draft do not count its own tokens.
    assert accepted == right or (sampling is DRAWN and accepted > 0.5 * right)
    assert len(results) <= (11 if sampling is GREEDY else 30)
    check_draft_cells(driver, draft_model)


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 7])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, HISTORICAL], ids=["greedy", "drawn", "historical"])
def test_a_model_that_is_wrong_changes_nothing(sampling: SamplingParams, wrong_every: int) -> None:
    prompts = [toy_prompt(f"{key} wrong") for key in range(3)]
    draft_model = ToyDraftModel(wrong_every=wrong_every)
    driver = pair(draft_model)
    driver.prefill(*(drafted(key, prompt, sampling=sampling) for key, prompt in enumerate(prompts)))
    results = driver.decode([0, 1, 2], max_draft_tokens=16)
    for key, prompt in enumerate(prompts):
        assert driver.output[key] == expected_output(prompt, 50, sampling=sampling, ignore_eos=True)
    right, accepted = counts(results)
    assert accepted < right
    assert driver.checked_free_cells() == 8192 - sum(len(prompt) + 49 for prompt in prompts)
    check_draft_cells(driver, draft_model)


def test_a_constraint_cuts_what_the_model_drafts() -> None:
    prompt = toy_prompt("constrained")
    grammar = toy_grammar("([a-m]{2}-){3,}[.]")
    draft_model = ToyDraftModel()
    driver = pair(draft_model)
    driver.prefill(with_parameters(first_chunk(0, prompt, max_new=40, grammar=grammar), max_draft_tokens=4))
    driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 40, grammar=grammar)
    check_draft_cells(driver, draft_model)


@pytest.mark.parametrize("layout", list(KvLayout))
def test_the_cells_of_the_draft_model_follow_those_of_the_sequences(layout: KvLayout) -> None:
    prompt = toy_prompt("a prompt that several sequences share")
    draft_model = ToyDraftModel(wrong_every=3)
    driver = pair(draft_model, layout=layout)
    driver.prefill(drafted(0, prompt))
    driver.decode([0], steps=8, max_draft_tokens=16)
    check_draft_cells(driver, draft_model)
    before = draft_model.cache.used
    assert before > len(prompt)
    copied = PrefixCopy(source_id=0, length=len(prompt))
    driver.prefill(drafted(1, toy_prompt(" one"), copy=copied), drafted(2, toy_prompt(" two"), copy=copied))
    assert draft_model.cache.length(1) == len(prompt)
    assert draft_model.cache.used == before, "copies share cells"
    driver.decode([0, 1, 2], steps=8, max_draft_tokens=16)
    check_draft_cells(driver, draft_model)
    # The id is taken over, and the sequence is cut back.
    driver.prefill(drafted(0, toy_prompt(" three"), copy=PrefixCopy(source_id=0, length=len(prompt) - 4)))
    assert draft_model.cache.length(0) == len(prompt) - 4
    driver.keep(0)
    assert {key for key, cells in draft_model.cache.held.items() if cells} == {0}
    driver.decode([0], max_draft_tokens=16)
    assert driver.output[0] == expected_output([*prompt[:-4], *toy_prompt(" three")], 50, ignore_eos=True)
    check_draft_cells(driver, draft_model)
    driver.engine.release_all()
    assert draft_model.cache.used == 0


def test_in_the_split_layout_the_model_drafts_for_all_sequences() -> None:
    prompts = [toy_prompt(f"number {key}") for key in range(3)]
    driver = pair(ToyDraftModel(), layout=KvLayout.SPLIT)
    driver.prefill(*(drafted(key, prompt) for key, prompt in enumerate(prompts)))
    results = driver.decode([0, 1, 2], max_draft_tokens=12)
    assert len(results) < 15
    assert all(len(set(result.drafts.drafted)) == 1 for result in results if result.drafts is not None)


@pytest.mark.parametrize("outcome", [DecodeOutcome.ABORTED, DecodeOutcome.FAILED, DecodeOutcome.NO_KV])
def test_a_model_whose_steps_fail_is_given_up(outcome: DecodeOutcome) -> None:
    prompt = toy_prompt("fails")
    draft_model = ToyDraftModel()
    driver = pair(draft_model)
    driver.prefill(drafted(0, prompt))
    driver.decode([0], steps=6, max_draft_tokens=4)
    tries: list[int] = []

    def fail(batch: Any) -> DecodeOutcome:
        tries.append(len(batch.tokens))
        return outcome

    draft_model.hook = fail
    driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 50, ignore_eos=True)
    assert len(tries) == 3
    assert draft_model.cache.used == 0


def test_a_failed_step_of_the_main_model_leaves_no_drafts_behind() -> None:
    prompt = toy_prompt("fails once")
    draft_model = ToyDraftModel()
    driver = pair(draft_model)
    driver.prefill(drafted(0, prompt))
    driver.decode([0], steps=6, max_draft_tokens=4)
    outcomes = iter([DecodeOutcome.NO_KV, DecodeOutcome.OK])
    driver.backend.hook = lambda _batch: next(outcomes, None)
    driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 50, ignore_eos=True)
    check_draft_cells(driver, draft_model)


def test_idle_sequences_make_room_in_the_draft_model() -> None:
    draft_model = ToyDraftModel(cells=256)
    driver = pair(draft_model)
    prompts = [toy_prompt(f"{key}" * 80) for key in range(3)]
    for key, prompt in enumerate(prompts):
        driver.prefill(drafted(key, prompt, max_new=12))
        assert counts(driver.decode([key], max_draft_tokens=4))[1] > 0, "the new one is drafted for"
        check_draft_cells(driver, draft_model)
    assert draft_model.cache.length(0) == 0
    assert draft_model.cache.length(2) > 80


def test_without_room_a_sequence_has_no_drafts() -> None:
    draft_model = ToyDraftModel(cells=64)
    driver = pair(draft_model)
    prompt = toy_prompt("long " * 20)
    driver.prefill(drafted(0, prompt))
    results = driver.decode([0], max_draft_tokens=4)
    assert counts(results) == (0, 0)
    assert driver.output[0] == expected_output(prompt, 50, ignore_eos=True)


def test_a_recurrent_model_has_no_drafts_of_a_model() -> None:
    draft_model = ToyDraftModel()
    driver = pair(draft_model, whole_only=True)
    driver.prefill(first_chunk(0, toy_prompt("recurrent")))
    driver.decode([0])
    assert draft_model.steps == 0


class FixedCosts(StepCosts):
    """Costs that no step changes, so that no test depends on the speed of the host."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        super().__init__()
        self._formula = seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def observe_change(self, tokens: int, seconds: float) -> None:
        """Learn nothing."""

    def knows(self, tokens: int) -> bool:
        return True

    def seconds(self, tokens: int) -> float:
        return self._formula(tokens)


def flat(tokens: int) -> float:
    """A step of 10 ms, whatever it computes."""
    return 0.01


def decide(draft_model: ToyDraftModel, seconds: Callable[[int], float]) -> EngineDriver:
    """Return a driver with Caravan's own rule, for steps of 10 ms, where drafting ``tokens`` takes ``seconds``."""
    drafting = Drafting()
    drafting._costs = FixedCosts(flat)
    driver = EngineDriver(ToyBackend(draft_model=draft_model), drafting=drafting)
    drafter, model = driver.engine._pool._drafter, drafting._model
    assert drafter is not None
    assert model is not None
    drafter.costs = drafter.reading = FixedCosts(seconds)
    # Nothing is tried that does not seem to pay.
    model._savings.seconds = 0.0
    model._tries._numbers |= set(range(9))
    return driver


def test_a_cheap_model_that_is_right_is_used() -> None:
    prompts = [toy_prompt(f"{key} learn what it costs") for key in range(4)]
    driver = decide(ToyDraftModel(), lambda _tokens: 0.001)
    driver.prefill(*(drafted(key, prompt, 8, max_new=200) for key, prompt in enumerate(prompts)))
    results = driver.decode([0, 1, 2, 3], max_draft_tokens=32)
    assert len(results) < 60
    for key, prompt in enumerate(prompts):
        assert driver.output[key] == expected_output(prompt, 200, ignore_eos=True)


def test_a_model_as_slow_as_the_main_one_is_not_used() -> None:
    draft_model = ToyDraftModel()
    driver = decide(draft_model, flat)
    at_start = draft_model.steps
    driver.prefill(drafted(0, toy_prompt("a b"), 8, max_new=200))
    results = driver.decode([0], max_draft_tokens=8)
    assert len(results) == 199
    assert counts(results) == (0, 0)
    assert draft_model.steps == at_start


def test_a_model_that_does_not_pay_is_tried_in_a_small_part_of_the_time() -> None:
    draft_model = ToyDraftModel()
    driver = decide(draft_model, flat)
    at_start = draft_model.steps
    driver.prefill(drafted(0, toy_prompt("a b"), 8, max_new=200))
    model = driver.engine._drafting._model
    assert model is not None
    drafts: list[Draft | None] = [None]
    # 0.5 % of 3.9 s are less than the 20 ms of a try, and of 4.1 s more.
    for seconds, tried in ((3.9, 0), (0.2, 2)):
        model.start_step(1, None)
        model.end_step(seconds, sequences=1, tokens=1, new=1)
        # It is not thought of in each step.
        for _ in range(10):
            model.add(drafts, [Draftable(driver.engine._pool.held[0], 4)], 4, equal=False)
        assert draft_model.steps == at_start + tried
    assert drafts == [None]
    driver.decode([0])
    check_draft_cells(driver, draft_model)


def test_a_cheap_model_that_is_wrong_is_given_up() -> None:
    driver = decide(ToyDraftModel(wrong_every=1), lambda _tokens: 0.002)
    tried = []
    for text in ("a b", "c d", "e f"):
        driver.prefill(drafted(0, toy_prompt(text), 8, max_new=200))
        results = driver.decode([0], max_draft_tokens=8)
        tried.append(counts(results)[0])
        assert counts(results)[1] == 0
        driver.engine.release_all()
    assert tried[0] < 40
    assert tried[2] < 0.5 * tried[0], "other sequences know"


def test_long_prompts_are_read_in_parts_that_take_no_longer_than_a_step() -> None:
    sizes: list[int] = []
    draft_model = ToyDraftModel(hook=lambda batch: sizes.append(len(batch.tokens)))
    driver = decide(draft_model, lambda tokens: 0.0002 + 0.00005 * tokens)
    prompt = toy_prompt("x" * 1000)
    driver.prefill(drafted(0, prompt, 8, max_new=400))
    assert max(sizes) == 1, "nothing is read in front of the first token"
    results = driver.decode([0], max_draft_tokens=8)
    assert driver.output[0] == expected_output(prompt, 400, ignore_eos=True)
    assert counts(results)[1] > 300
    assert max(sizes) == 128


def test_a_prompt_is_not_read_for_a_few_tokens() -> None:
    draft_model = ToyDraftModel()
    driver = decide(draft_model, lambda tokens: 0.001 * tokens)
    driver.prefill(drafted(0, toy_prompt("x" * 1000), 8, max_new=30))
    assert counts(driver.decode([0], max_draft_tokens=8)) == (0, 0)
    assert draft_model.cache.used == 0


def test_the_draft_model_may_lack_the_last_tokens_of_the_vocabulary() -> None:
    class Small(ToyDraftModel):
        def logits(self, rows: int) -> Floats:
            return super().logits(rows)[:, :200]

    draft_model = Small()
    draft_model.facts = replace(draft_model.facts, vocabulary_size=200)
    driver = pair(draft_model)
    biases = ((250, 100.0), (65, 0.5))
    for prompt, sampling, drafts in (
        (toy_prompt("abc"), GREEDY, True),
        # The draft model has the prompt, but none of the tokens that are chosen.
        (toy_prompt("abc"), SamplingParams(temperature=0.0, biases=biases), False),
        ([97, 230, 99], GREEDY, False),
    ):
        driver.prefill(drafted(0, prompt, sampling=sampling))
        right, accepted = counts(driver.decode([0], max_draft_tokens=4))
        assert driver.output[0] == expected_output(prompt, 50, sampling=sampling, ignore_eos=True)
        assert (accepted > 0) is drafts, right
        driver.engine.release_all()
