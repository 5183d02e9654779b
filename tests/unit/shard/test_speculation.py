"""Steps with drafts, on the toy model: the same tokens in fewer steps."""

from collections.abc import Sequence
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Chunk, Decode
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import DraftSource, FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, toy_grammar, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_output

GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.9, top_k=40, repetition_penalty=1.2, seed=5)
HISTORICAL = SamplingParams(
    temperature=1.0, frequency_penalty=0.4, dry_multiplier=0.9, dry_allowed_length=1, xtc_probability=0.5, seed=3
)


def predicting(
    sequence_id: int, prompt: Sequence[int], predicted: Sequence[int], most: int = 4, **fields: Any
) -> Chunk:
    """Make a first chunk of a sequence with a prediction."""
    chunk = first_chunk(sequence_id, prompt, **fields)
    return with_parameters(chunk, max_draft_tokens=most, prediction=tuple(predicted))


def corrupt(output: Sequence[int], every: int) -> list[int]:
    """Replace tokens of ``output``."""
    return [66 if place % every == every - 1 else token for place, token in enumerate(output)]


def counts(results: Sequence[StepResult]) -> tuple[int, int]:
    """Return how many draft tokens there were and how many were accepted."""
    drafts = [result.drafts for result in results if result.drafts is not None]
    return sum(sum(one.drafted) for one in drafts), sum(sum(one.accepted) for one in drafts)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, HISTORICAL], ids=["greedy", "drawn", "historical"])
def test_a_right_prediction_takes_fewer_steps(sampling: SamplingParams) -> None:
    prompt = toy_prompt("predict me")
    expected = expected_output(prompt, 50, sampling=sampling, ignore_eos=True)
    driver = EngineDriver()
    driver.prefill(predicting(0, prompt, expected, sampling=sampling, ignore_eos=True))
    results = driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected
    # The first of 50 tokens comes with the prefill, the last of each step's five is no draft.
    assert len(results) == 10
    assert counts(results) == (39, 39)
    assert results[-1].rows.finish_reasons[-1] is FinishReason.LENGTH
    assert all(reason is None for result in results for reason in result.rows.finish_reasons[:-1])


@pytest.mark.parametrize("memory", [{}, {"whole_only": True, "rollback_tokens": 3}], ids=["cells", "recurrent"])
@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("sampling", [GREEDY, HISTORICAL], ids=["greedy", "historical"])
def test_a_wrong_prediction_changes_nothing(sampling: SamplingParams, every: int, memory: dict[str, Any]) -> None:
    prompt = toy_prompt("predict me wrongly")
    expected = expected_output(prompt, 50, sampling=sampling)
    driver = EngineDriver(ToyBackend(**memory))
    driver.prefill(predicting(0, prompt, corrupt(expected, every), sampling=sampling))
    results = driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected
    drafted, accepted = counts(results)
    assert accepted < drafted
    most = memory.get("rollback_tokens", 4)
    assert max(max(one.drafts.drafted) for one in results if one.drafts is not None) == most
    # The rejected tokens hold no cells.
    assert driver.checked_free_cells() == 8192 - len(prompt) - len(expected) + 1


def pooled(
    driver: EngineDriver, sequence_id: int, prompt: Sequence[int], pool: bytes, **command: Any
) -> list[StepResult]:
    """Run a sequence of a pool to its end, and release it. ``command``: fields of its prefill."""
    chunk = first_chunk(sequence_id, prompt, max_new=40, sampling=HISTORICAL, ignore_eos=True)
    driver.prefill(with_parameters(chunk, max_draft_tokens=4, draft_pool=pool), **command)
    results = driver.decode([sequence_id], max_draft_tokens=4)
    assert driver.output[sequence_id] == expected_output(prompt, 40, sampling=HISTORICAL, ignore_eos=True)
    driver.keep()
    return results


def test_a_repeated_prompt_of_the_same_pool_takes_fewer_steps() -> None:
    prompt = toy_prompt("ask me twice, and once more")
    driver = EngineDriver()
    first, second = (pooled(driver, 0, prompt, b"mine") for _ in range(2))
    assert (counts(first), len(first)) == ((0, 0), 39)
    # The first of 40 tokens comes with the prefill, the last of each step's five is no draft.
    assert (counts(second), len(second)) == ((31, 31), 8)
    assert {source for result in second if result.drafts for source in result.drafts.sources} == {DraftSource.POOL}
    for other in (b"theirs", b""):
        assert counts(pooled(driver, 0, prompt, other)) == (0, 0)


def test_a_sequence_that_the_router_ends_leaves_its_output_and_one_without_drafts_does_not() -> None:
    prompt = toy_prompt("ended at a stop string of the client")
    for most, drafted in ((4, True), (0, False)):
        driver = EngineDriver()
        chunk = first_chunk(0, prompt, max_new=40, sampling=HISTORICAL, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=most, draft_pool=b"mine"))
        driver.decode([0], steps=20)
        results = pooled(driver, 1, prompt, b"mine", park={0: len(prompt) + 20})
        assert (counts(results) != (0, 0)) is drafted


def test_a_wrong_draft_costs_its_own_cells_only_while_the_step_runs() -> None:
    seen: list[int] = []
    driver = EngineDriver()
    driver.backend.hook = lambda batch: seen.append(len(batch.tokens))
    prompt = toy_prompt("abc")
    driver.prefill(predicting(0, prompt, [66] * 20, ignore_eos=True))
    driver.decode([0], steps=2, max_draft_tokens=4)
    assert seen == [3, 2, 1], "the last token of a command has no draft"
    assert driver.checked_free_cells() == 8192 - 3 - 2


def test_the_context_has_drafts_where_an_output_repeats_itself() -> None:
    prompt = toy_prompt("x")
    grammar = toy_grammar("(abcdefghij){5}|q")
    expected = expected_output(prompt, 60, grammar=grammar)
    driver = EngineDriver()
    driver.prefill(predicting(0, prompt, (), max_new=60, grammar=grammar))
    results = driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected
    sources = {source for result in results if result.drafts is not None for source in result.drafts.sources}
    assert sources <= {DraftSource.CONTEXT, DraftSource.CONSTRAINT}


def test_text_that_a_constraint_forces_is_drafted() -> None:
    prompt = toy_prompt("x")
    grammar = toy_grammar("[a-f](ghijklmnop){2}[.]")
    driver = EngineDriver()
    driver.prefill(predicting(0, prompt, (), max_new=60, grammar=grammar))
    results = driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected_output(prompt, 60, grammar=grammar)
    assert counts(results) == (16, 16)
    sources = {source for result in results if result.drafts is not None for source in result.drafts.sources}
    assert sources == {DraftSource.CONSTRAINT}


@pytest.mark.parametrize("every", [1, 3, 99])
def test_a_constrained_output_stays_within_its_grammar(every: int) -> None:
    prompt = toy_prompt("constrained")
    grammar = toy_grammar("([a-m]{2}-){3,}[.]")
    for sampling in (GREEDY, DRAWN, HISTORICAL):
        expected = expected_output(prompt, 40, sampling=sampling, grammar=grammar)
        driver = EngineDriver()
        driver.prefill(
            predicting(0, prompt, corrupt(expected, every), sampling=sampling, max_new=40, grammar=grammar),
            first_chunk(1, toy_prompt("beside"), max_new=40, grammar=grammar),
        )
        driver.decode([0, 1], max_draft_tokens=4)
        assert driver.output[0] == expected
        assert driver.output[1] == expected_output(toy_prompt("beside"), 40, grammar=grammar)


def test_logprobs_are_those_of_the_tokens() -> None:
    prompt = toy_prompt("with logprobs")
    fields: dict[str, Any] = {"logprobs": True, "top_n_tokens": 2, "max_new": 12, "ignore_eos": True}
    plain = EngineDriver()
    plain.prefill(first_chunk(0, prompt, **fields), first_chunk(1, toy_prompt("none"), max_new=12, ignore_eos=True))
    wanted = [result.rows for result in plain.decode([0, 1])]
    driver = EngineDriver()
    driver.prefill(
        predicting(0, prompt, corrupt(expected_output(prompt, 12, ignore_eos=True), 5), **fields),
        first_chunk(1, toy_prompt("none"), max_new=12, ignore_eos=True),
    )
    got = [result.rows for result in driver.decode([0, 1], max_draft_tokens=4)]

    def of_first(columns: Any) -> list[tuple[Any, ...]]:
        found = []
        for rows in columns:
            assert len(rows.logprobs) == len(rows.top_counts) == len(rows.token_ids) or not rows.logprobs
            start = 0
            for row, sequence_id in enumerate(rows.sequence_ids):
                end = start + (rows.top_counts[row] if rows.top_counts else 0)
                if sequence_id == 0:
                    found.append((rows.token_ids[row], rows.logprobs[row], rows.top_token_ids[start:end]))
                start = end
        return found

    assert of_first(got) == of_first(wanted)


def test_an_end_token_in_a_draft_ends_the_sequence() -> None:
    prompt = next(
        prompt
        for prompt in (toy_prompt(f"prompt {number}") for number in range(1_000))
        if 3 <= len(expected_output(prompt, 30)) <= 5
    )
    expected = expected_output(prompt, 30)
    driver = EngineDriver()
    driver.prefill(predicting(0, prompt, [*expected, 65, 66, 67], most=8))
    (result,) = driver.decode([0], max_draft_tokens=8)
    assert driver.output[0] == expected
    assert result.rows.finish_reasons[-1] is FinishReason.EOS_TOKEN
    assert result.drafts is not None
    assert result.drafts.accepted == [len(expected) - 1]
    assert driver.checked_free_cells() == 8192 - len(prompt) - len(expected) + 1


def test_a_stop_token_in_a_draft_ends_the_sequence() -> None:
    prompt = toy_prompt("stop in the middle")
    whole = expected_output(prompt, 20, ignore_eos=True)
    stop = next(token for place, token in enumerate(whole) if place > 5 and whole.index(token) == place)
    driver = EngineDriver()
    fields: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": frozenset({stop}), "min_tokens": 2}
    expected = expected_output(prompt, 20, **fields)
    driver.prefill(predicting(0, prompt, whole, most=8, **fields))
    driver.decode([0], max_draft_tokens=8)
    assert driver.output[0] == expected


def test_drafts_of_several_sequences_share_a_budget() -> None:
    prompts = [toy_prompt(f"number {key}") for key in range(4)]
    outputs = [expected_output(prompt, 30, ignore_eos=True) for prompt in prompts]
    driver = EngineDriver()
    driver.prefill(
        *(predicting(key, prompts[key], outputs[key], max_new=30, ignore_eos=True) for key in range(3)),
        first_chunk(3, prompts[3], max_new=30, ignore_eos=True),
    )
    results = driver.decode([0, 1, 2, 3], max_draft_tokens=6)
    assert driver.output == dict(enumerate(outputs))
    assert all(sum(result.drafts.drafted) <= 6 for result in results if result.drafts is not None)
    assert results[0].drafts is not None
    assert results[0].drafts.drafted == [4, 2]


def test_no_sequence_gets_more_tokens_than_steps() -> None:
    prompts = [toy_prompt(f"number {key}") for key in range(2)]
    driver = EngineDriver()
    driver.prefill(
        predicting(0, prompts[0], expected_output(prompts[0], 50, ignore_eos=True), most=8, ignore_eos=True),
        first_chunk(1, prompts[1], ignore_eos=True),
    )
    results = driver.decode([0, 1], steps=7, max_draft_tokens=8)
    assert len(driver.output[0]) == 1 + 7
    assert len(driver.output[1]) == 1 + len(results)


def test_a_step_without_room_for_its_drafts_runs_without_them() -> None:
    prompt = toy_prompt("x" * 20)
    expected = expected_output(prompt, 15, ignore_eos=True)
    driver = EngineDriver(ToyBackend(cells=40))
    driver.prefill(first_chunk(1, toy_prompt("y" * 14), max_new=5))
    driver.prefill(predicting(0, prompt, expected, most=8, max_new=15, ignore_eos=True))
    for steps, drafted in ((1, 0), (2, 1), (3, 2)):
        (result, *_) = driver.decode([0], steps=steps, max_draft_tokens=8)
        assert counts([result]) == (drafted, drafted)
    assert driver.output[0] == expected[:7]
    assert driver.checked_free_cells() == 0
    driver = EngineDriver(ToyBackend(cells=40))
    driver.prefill(first_chunk(1, toy_prompt("y" * 14), max_new=5))
    driver.prefill(predicting(0, prompt, expected, most=8, max_new=15, ignore_eos=True))
    command = Decode(sequence_ids=[0], max_steps=9, max_draft_tokens=8)
    assert driver.engine.begin_decode(command) is None
    step = driver.engine.decode_step([0], 0, DraftBudget(8, 8))
    assert isinstance(step, StepResult)
    assert step.drafts is None, "eight draft tokens have no room"
    assert step.rows.token_ids == expected[1:2]


@pytest.mark.parametrize("outcome", [DecodeOutcome.ABORTED, DecodeOutcome.FAILED, DecodeOutcome.INVALID])
def test_a_failed_step_with_drafts_changes_nothing(outcome: DecodeOutcome) -> None:
    prompt = toy_prompt("fails once")
    grammar = toy_grammar("[a-f]+[.]")
    expected = expected_output(prompt, 20, grammar=grammar)
    driver = EngineDriver()
    driver.prefill(predicting(0, prompt, expected, max_new=20, grammar=grammar))
    used = driver.backend.cache.used
    fail_once = iter([outcome])
    driver.backend.hook = lambda _batch: next(fail_once, None)
    command = Decode(sequence_ids=[0], max_steps=9, max_draft_tokens=4)
    assert driver.engine.begin_decode(command) is None
    failed = driver.engine.decode_step([0], 0, DraftBudget(4, 8))
    assert isinstance(failed, Refusal) or not failed or failed.rows.token_ids == []
    assert driver.backend.cache.used == used
    driver.decode([0], max_draft_tokens=4)
    assert driver.output[0] == expected


def test_in_the_split_layout_all_sequences_have_drafts_of_one_length_or_none_has() -> None:
    batches: list[list[int]] = []

    def note(batch: TokenBatch) -> None:
        batches.append(batch.sequence_ids.tolist())

    prompts = [toy_prompt(f"number {key}") for key in range(2)]
    outputs = [expected_output(prompt, 30, ignore_eos=True) for prompt in prompts]
    driver = EngineDriver(ToyBackend(layout=KvLayout.SPLIT, hook=note))
    driver.prefill(
        predicting(0, prompts[0], outputs[0], most=8, max_new=30, ignore_eos=True),
        predicting(1, prompts[1], outputs[1], most=3, max_new=30, ignore_eos=True),
    )
    driver.decode([0, 1], max_draft_tokens=16)
    assert batches[1] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert driver.output == dict(enumerate(outputs))

    driver = EngineDriver(ToyBackend(layout=KvLayout.SPLIT, hook=note))
    driver.prefill(
        predicting(0, prompts[0], outputs[0], most=8, max_new=30, ignore_eos=True),
        first_chunk(1, prompts[1], max_new=10, ignore_eos=True),
    )
    results = driver.decode([0, 1], max_draft_tokens=16)
    assert all(result.drafts is None for result in results[:9])
    # Alone it has drafts.
    assert len(results) < 15
    assert driver.output[0] == outputs[0]


def test_a_sequence_in_the_split_layout_stays_within_its_cells() -> None:
    prompt = toy_prompt("x" * 20)
    expected = expected_output(prompt, 13, ignore_eos=True)
    driver = EngineDriver(ToyBackend(cells=128, max_sequences=4, layout=KvLayout.SPLIT))
    driver.prefill(predicting(0, prompt, expected, most=8, max_new=13, ignore_eos=True))
    driver.decode([0], max_draft_tokens=16)
    assert driver.output[0] == expected


def test_more_drafts_than_outputs_are_refused_and_all_of_recurrent_models() -> None:
    def refusal(backend: ToyBackend, most: int) -> Refusal | None:
        driver = EngineDriver(backend)
        driver.prefill(first_chunk(0, toy_prompt("a")))
        return driver.engine.begin_decode(Decode(sequence_ids=[0], max_steps=2, max_draft_tokens=most))

    assert refusal(ToyBackend(max_prompt_logprob_tokens=16), 16) is None
    too_many = refusal(ToyBackend(max_prompt_logprob_tokens=16), 17)
    assert too_many is not None
    assert too_many.error is ShardError.TOO_MANY_TOKENS
    assert refusal(ToyBackend(max_batch_tokens=8), 7) is None
    assert refusal(ToyBackend(max_batch_tokens=8), 8) is not None
    recurrent = ToyBackend(whole_only=True)
    assert recurrent.capacity.max_draft_tokens == 0
    assert refusal(recurrent, 1) is not None


@pytest.mark.parametrize("predicted", [(260,), (-1,), (1,) * 8193])
def test_wrong_predictions_are_refused(predicted: tuple[int, ...]) -> None:
    refusal = EngineDriver().try_prefill(predicting(0, toy_prompt("a"), predicted))
    assert isinstance(refusal, Refusal)
    assert refusal.error is ShardError.BAD_REQUEST
