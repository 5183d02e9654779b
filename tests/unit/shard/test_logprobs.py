"""Prompt logprobs, and Evaluate: log probabilities of known tokens on the toy model."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Chunk, PrefixCopy, RowOutputs
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_shard.protocol.results import Evaluations, PromptLogprobs, Refusal, StepResult
from caravan_testing.shard_builders import (
    EngineDriver,
    first_chunk,
    load_entry,
    next_chunk,
    row,
    save_entry,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_logprobs, expected_output

PROMPT = toy_prompt("a prompt with its log probabilities")
TOP = 3
VOCABULARY = ToyVocabulary()

CONTEXT = toy_prompt("a context that many rows share: ")
ENDINGS = [toy_prompt(text) for text in ("yes", "no, never", "x")]


def with_prompt_logprobs(
    sequence_id: int, tokens: list[int], *, prompt: list[int] = PROMPT, last: bool = True
) -> Chunk:
    """Make the first chunk of ``prompt``, with prompt logprobs."""
    chunk = first_chunk(
        sequence_id, tokens, total=len(prompt), last=last, logprobs=True, top_n_tokens=TOP, ignore_eos=True
    )
    return with_parameters(chunk, prompt_logprobs=True)


def check(chunks: list[PromptLogprobs], sequence_id: int, prompt: list[int] = PROMPT) -> None:
    """Check the prompt logprobs of one sequence, chunk after chunk, against the model's."""
    logprobs, top_counts, top_ids, top_logprobs = [], [], [], []
    for rows in chunks:
        at = rows.sequence_ids.index(sequence_id)
        start = sum(rows.counts[:at])
        stop = start + rows.counts[at]
        logprobs += rows.logprobs[start:stop]
        top_counts += rows.top_counts[start:stop]
        first, end = sum(rows.top_counts[:start]), sum(rows.top_counts[:stop])
        top_ids += rows.top_token_ids[first:end]
        top_logprobs += rows.top_logprobs[first:end]
        pieces = [VOCABULARY.piece(token) for token in rows.top_token_ids[first:end]]
        assert rows.top_pieces[first:end] == [piece.data for piece in pieces]
        assert rows.top_specials[first:end] == [piece.special for piece in pieces]
    expected = expected_logprobs(prompt)
    assert np.isnan(logprobs[0])
    assert logprobs[1:] == pytest.approx(
        [row[token] for row, token in zip(expected, prompt[1:], strict=True)], abs=1e-4
    )
    assert top_counts == [0] + [TOP] * len(expected)
    assert top_ids == [token for row in expected for token in np.argsort(-row, kind="stable")[:TOP]]
    assert top_logprobs == pytest.approx([value for row in expected for value in np.sort(row)[::-1][:TOP]], abs=1e-4)


def prompt_logprobs_of(result: StepResult | Refusal) -> PromptLogprobs:
    assert isinstance(result, StepResult), result
    assert result.prompt_logprobs is not None
    return result.prompt_logprobs


@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
@pytest.mark.parametrize("size", [1, 2, 7, len(PROMPT) - 1, len(PROMPT)])
def test_chunks_of_any_size_give_the_same_prompt_logprobs(layout: KvLayout, size: int) -> None:
    driver = EngineDriver(ToyBackend(layout=layout))
    driver.prefill(first_chunk(0, toy_prompt("rider"), ignore_eos=True))
    rows = []
    for start in range(0, len(PROMPT), size):
        part, last = PROMPT[start : start + size], start + size >= len(PROMPT)
        chunk = next_chunk(1, start, part, last=last) if start else with_prompt_logprobs(1, part, last=last)
        result = driver.prefill(chunk, riders=[0])
        assert result.rows.sequence_ids == ([0, 1] if last else [0])
        rows.append(prompt_logprobs_of(result))
    check(rows, 1)
    assert driver.engine._pool.held[1].last_logits is None
    driver.decode([0, 1])
    assert driver.output[1] == expected_output(PROMPT, 50, ignore_eos=True)
    assert driver.output[0] == expected_output(toy_prompt("rider"), 50, ignore_eos=True)


def test_prompt_logprobs_of_one_step_go_to_their_sequences() -> None:
    other = toy_prompt("another")
    driver = EngineDriver()
    result = driver.prefill(
        with_prompt_logprobs(1, PROMPT),
        with_prompt_logprobs(4, other, prompt=other),
        first_chunk(0, PROMPT),
        first_chunk(2, other, ignore_eos=True),
    )
    rows = prompt_logprobs_of(result)
    assert (rows.sequence_ids, rows.counts) == ([1, 4], [len(PROMPT), len(other)])
    check([rows], 1)
    check([rows], 4, other)
    driver.decode([0, 1, 2, 4])
    assert driver.output[0] == expected_output(PROMPT, 50)
    assert driver.output[4] == driver.output[2] == expected_output(other, 50, ignore_eos=True)


def test_prompt_logprobs_are_computed_only_on_request() -> None:
    driver = EngineDriver()
    assert driver.prefill(first_chunk(0, PROMPT, logprobs=True)).prompt_logprobs is None


def test_earlier_output_has_no_prompt_logprobs() -> None:
    driver = EngineDriver()
    earlier = expected_output(PROMPT, 8, ignore_eos=True)
    tokens = PROMPT + earlier
    chunk = with_parameters(with_prompt_logprobs(0, tokens[:-3], prompt=tokens, last=False), prompt_length=len(PROMPT))
    result = driver.prefill(chunk)
    check([prompt_logprobs_of(result)], 0)
    result = driver.prefill(next_chunk(0, len(tokens) - 3, tokens[-3:]))
    assert result.prompt_logprobs is None
    driver.decode([0])
    assert driver.output[0] == expected_output(PROMPT, 50, ignore_eos=True, earlier_output=earlier)


@pytest.mark.parametrize("outcome", [DecodeOutcome.NO_KV, DecodeOutcome.ABORTED, DecodeOutcome.FAILED])
def test_a_failed_step_changes_no_prompt_logprobs(outcome: DecodeOutcome) -> None:
    driver = EngineDriver()
    rows = [prompt_logprobs_of(driver.prefill(with_prompt_logprobs(0, PROMPT[:10], last=False)))]
    driver.backend.hook = lambda _batch: outcome
    answer = driver.try_prefill(next_chunk(0, 10, PROMPT[10:20], last=False))
    assert isinstance(answer, Refusal) or (answer.outcome is not StepOutcome.OK and answer.prompt_logprobs is None)
    driver.backend.hook = None
    rows.append(prompt_logprobs_of(driver.prefill(next_chunk(0, 10, PROMPT[10:25], last=False))))
    rows.append(prompt_logprobs_of(driver.prefill(next_chunk(0, 25, PROMPT[25:]))))
    check(rows, 0)


def test_a_prompt_continues_in_the_other_layout() -> None:
    driver = EngineDriver(ToyBackend(other_layouts=[KvLayout.SPLIT]))
    rows = [prompt_logprobs_of(driver.prefill(with_prompt_logprobs(0, PROMPT[:10], last=False)))]
    assert driver.set_layout(KvLayout.SPLIT) == []
    rows.append(prompt_logprobs_of(driver.prefill(next_chunk(0, 10, PROMPT[10:]))))
    check(rows, 0)


@pytest.mark.parametrize("size", [1, 4, len(PROMPT)])
@pytest.mark.parametrize("takes_over", [False, True])
def test_a_copy_has_prompt_logprobs_from_the_second_token_behind_it(size: int, *, takes_over: bool) -> None:
    driver = EngineDriver()
    copied, key = 9, 0 if takes_over else 1
    driver.prefill(first_chunk(0, PROMPT, max_new=1))
    logprobs = []
    for start in range(copied, len(PROMPT), size):
        part, last = PROMPT[start : start + size], start + size >= len(PROMPT)
        chunk = next_chunk(key, start, part, last=last)
        if start == copied:
            copy = PrefixCopy(source_id=0, length=copied)
            chunk = first_chunk(key, part, total=len(PROMPT), last=last, copy=copy, logprobs=True, ignore_eos=True)
            chunk = with_parameters(chunk, prompt_logprobs=True)
        rows = prompt_logprobs_of(driver.prefill(chunk))
        assert rows.counts == [len(part)]
        logprobs += rows.logprobs
    assert np.isnan(logprobs[0])
    expected = [row[token] for row, token in zip(expected_logprobs(PROMPT), PROMPT[1:], strict=True)]
    assert logprobs[1:] == pytest.approx(expected[copied:], abs=1e-4)
    driver.decode([key])
    assert driver.output[key] == expected_output(PROMPT, 50, ignore_eos=True)


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def driver(request: pytest.FixtureRequest) -> EngineDriver:
    """A shard on which sequence 0 holds the context."""
    driver = EngineDriver(ToyBackend(layout=request.param))
    driver.evaluate(row(0, CONTEXT, outputs=RowOutputs.NONE))
    return driver


def expected_after(tokens: Sequence[int], outputs: int) -> np.ndarray:
    """Return the log probabilities [outputs, vocabulary] after each of the last tokens."""
    return np.array(expected_logprobs([*tokens, 0])[-outputs:])


def check_evaluations(found: Evaluations, place: int, tokens: Sequence[int], outputs: int) -> None:
    """Check the log probabilities of the tokens that follow the outputs of a row that ends ``tokens``."""
    start = sum(found.counts[:place])
    assert found.counts[place] == outputs
    *logprobs, last = found.logprobs[start : start + outputs]
    following = tokens[len(tokens) - outputs + 1 :]
    rows = expected_after(tokens, outputs)[:-1]
    assert logprobs == pytest.approx([row[token] for row, token in zip(rows, following, strict=True)], abs=1e-4)
    assert math.isnan(last)


def test_endings_of_one_context_are_scored_in_one_step(driver: EngineDriver) -> None:
    used = driver.backend.cache.used
    rows = [
        row(place, CONTEXT[-1:] + ending, copy=PrefixCopy(source_id=0, length=len(CONTEXT) - 1), keep_length=0)
        for place, ending in enumerate(ENDINGS, start=1)
    ]
    found = driver.evaluate(*rows)
    assert found.sequence_ids == [1, 2, 3]
    for place, ending in enumerate(ENDINGS):
        check_evaluations(found, place, CONTEXT + ending, len(ending) + 1)
    assert driver.backend.cache.used == used
    assert driver.keep(0).sequence_ids == [0]


def test_alternatives_and_chosen_ids_come_with_each_output(driver: EngineDriver) -> None:
    found = driver.evaluate(row(0, [65, 66], len(CONTEXT), top_n_tokens=3, score_token_ids=[9, 70, 9]))
    expected = expected_after([*CONTEXT, 65, 66], 2)
    assert found.top_counts == [3, 3]
    assert found.top_token_ids == [token for one in expected for token in np.argsort(-one, kind="stable")[:3]]
    assert found.top_logprobs == pytest.approx(
        [value for one in expected for value in np.sort(one)[::-1][:3]], abs=1e-4
    )
    assert found.top_pieces == [ToyVocabulary().piece(token).data for token in found.top_token_ids]
    assert found.top_specials == [ToyVocabulary().piece(token).special for token in found.top_token_ids]
    assert found.score_logprobs == pytest.approx([one[token] for one in expected for token in (9, 70, 9)], abs=1e-4)


def test_beams_take_one_token_each_and_branch(driver: EngineDriver) -> None:
    """Each step gives the best tokens of all beams; a beam that dies makes room for a second child of another."""
    driver.evaluate(
        row(1, CONTEXT[-1:], copy=PrefixCopy(source_id=0, length=len(CONTEXT) - 1), outputs=RowOutputs.NONE)
    )
    beams = {0: [*CONTEXT], 1: [*CONTEXT]}
    for step in range(6):
        rows = [row(key, [65 + step + key], len(beams[key]), outputs=RowOutputs.LAST, top_n_tokens=4) for key in beams]
        found = driver.evaluate(*rows)
        assert (found.sequence_ids, found.counts) == ([0, 1], [1, 1])
        for place, (key, tokens) in enumerate(beams.items()):
            tokens.append(65 + step + key)
            expected = np.argsort(-expected_after(tokens, 1)[0], kind="stable")[:4]
            assert found.top_token_ids[4 * place : 4 * place + 4] == expected.tolist()
        if step == 3:
            copy = PrefixCopy(source_id=0, length=len(beams[0]))
            driver.evaluate(row(1, [90], copy=copy), row(0, [91], len(beams[0])), release=[1])
            beams = {0: [*beams[0], 91], 1: [*beams[0], 90]}
    assert driver.checked_free_cells() >= 0
    driver.prefill(first_chunk(0, toy_prompt("!"), copy=PrefixCopy(source_id=0, length=len(beams[0])), ignore_eos=True))
    driver.decode([0])
    assert driver.output[0] == expected_output([*beams[0], *toy_prompt("!")], 50, ignore_eos=True)


def test_a_row_without_outputs_returns_nothing_and_may_exceed_the_budget() -> None:
    driver = EngineDriver(ToyBackend(max_prompt_logprob_tokens=2))
    found = driver.evaluate(row(0, CONTEXT, outputs=RowOutputs.NONE), row(1, CONTEXT, outputs=RowOutputs.LAST))
    assert (found.sequence_ids, found.counts) == ([1], [1])


@pytest.mark.parametrize("kept", [1, len(CONTEXT) - 3, len(CONTEXT), len(CONTEXT) + 2])
def test_a_sequence_is_cut_back_and_grows_again(driver: EngineDriver, kept: int) -> None:
    driver.evaluate(row(1, [70], copy=PrefixCopy(source_id=0, length=len(CONTEXT))))
    driver.evaluate(row(0, toy_prompt("tail"), len(CONTEXT), keep_length=kept))
    tokens = [*CONTEXT, *toy_prompt("tail")][:kept]
    assert driver.backend.length(0) == kept
    driver.checked_free_cells()
    found = driver.evaluate(row(0, toy_prompt("again"), kept))
    check_evaluations(found, 0, [*tokens, *toy_prompt("again")], 5)
    driver.checked_free_cells()
    driver.evaluate(row(1, [71], len(CONTEXT) + 1))
    driver.keep(1)
    driver.checked_free_cells()


def test_a_sequence_that_has_not_ended_continues_as_if_there_had_been_no_row(driver: EngineDriver) -> None:
    prompt = toy_prompt("running")
    driver.prefill(first_chunk(5, prompt, ignore_eos=True, temperature=1.0, repetition_penalty=1.3, seed=4))
    driver.prefill(first_chunk(6, prompt[:3], total=len(prompt), last=False))
    driver.decode([5], steps=3)
    held = len(prompt) + 3
    driver.evaluate(row(5, toy_prompt("what if"), held, keep_length=held), row(6, [70], 3, keep_length=3))
    driver.checked_free_cells()
    alone = EngineDriver()
    alone.prefill(first_chunk(5, prompt, ignore_eos=True, temperature=1.0, repetition_penalty=1.3, seed=4))
    alone.decode([5])
    driver.decode([5])
    assert driver.output[5] == alone.output[5]


def test_a_taken_over_sequence_becomes_an_ended_one(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(5, CONTEXT, ignore_eos=True))
    found = driver.evaluate(row(5, [65, 66], copy=PrefixCopy(source_id=5, length=4)))
    check_evaluations(found, 0, [*CONTEXT[:4], 65, 66], 2)
    assert driver.decode([5]) == []
    driver.checked_free_cells()


def test_an_evaluated_sequence_is_saved_and_loaded(driver: EngineDriver) -> None:
    tokens = [*CONTEXT, 65, 66]
    driver.evaluate(row(0, [65, 66], len(CONTEXT)))
    assert driver.save(save_entry(0, tokens, release=True)) == [True]
    assert driver.load(load_entry(3, tokens)) == [True]
    check_evaluations(driver.evaluate(row(3, [67, 68], len(tokens))), 0, [*tokens, 67, 68], 2)


def test_a_sequence_that_ended_by_itself_grows_from_its_cells(driver: EngineDriver) -> None:
    driver.prefill(first_chunk(5, CONTEXT, max_new=2, ignore_eos=True))
    driver.decode([5])
    tokens = [*CONTEXT, driver.output[5][0]]
    check_evaluations(driver.evaluate(row(5, [65, 66], len(tokens))), 0, [*tokens, 65, 66], 2)


@pytest.mark.parametrize("outcome", [DecodeOutcome.NO_KV, DecodeOutcome.ABORTED, DecodeOutcome.FAILED])
def test_a_failed_step_changes_nothing(driver: EngineDriver, outcome: DecodeOutcome) -> None:
    driver.prefill(first_chunk(5, CONTEXT, ignore_eos=True))
    driver.backend.hook = lambda _batch: outcome
    length = len(CONTEXT)
    answer = driver.try_evaluate(
        row(0, [65, 66], length),
        row(1, [65], copy=PrefixCopy(source_id=0, length=4)),
        row(5, [70], length, keep_length=length),
    )
    if isinstance(answer, Refusal):
        assert answer.error is ShardError.FORWARD_FAILED
    else:
        assert answer.outcome.value == outcome.value
        assert answer.evaluations is None
    driver.backend.hook = None
    assert [driver.backend.length(key) for key in (0, 1, 5)] == [length, 0, length]
    driver.checked_free_cells()
    check_evaluations(driver.evaluate(row(0, [65, 66], length)), 0, [*CONTEXT, 65, 66], 2)
    driver.decode([5])
    assert driver.output[5] == expected_output(CONTEXT, 50, ignore_eos=True)


def test_a_full_cache_is_an_outcome_also_when_a_sequence_is_taken_over() -> None:
    driver = EngineDriver(ToyBackend(cells=20))
    driver.evaluate(row(0, CONTEXT[:9], outputs=RowOutputs.NONE), row(1, CONTEXT[:9], outputs=RowOutputs.NONE))
    for answer in (
        driver.try_evaluate(row(0, [1, 2, 3], 9)),
        driver.try_evaluate(row(0, [1] * 9, copy=PrefixCopy(source_id=0, length=4))),
    ):
        assert isinstance(answer, StepResult)
        assert answer.outcome is StepOutcome.NO_KV
    assert driver.backend.length(0) == 9


def test_recurrent_memory_is_kept_whole_or_released() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.evaluate(row(0, CONTEXT))
    whole = PrefixCopy(source_id=0, length=len(CONTEXT))
    answer = driver.try_evaluate(row(1, [65, 66], copy=whole, keep_length=len(CONTEXT)))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.WRONG_POSITION
    assert "cannot be cut back" in answer.sentence
    check_evaluations(driver.evaluate(row(1, [65, 66], copy=whole, keep_length=0)), 0, [*CONTEXT, 65, 66], 2)
    check_evaluations(driver.evaluate(row(0, [65, 66], len(CONTEXT))), 0, [*CONTEXT, 65, 66], 2)
    driver.prefill(first_chunk(2, CONTEXT, ignore_eos=True))
    answer = driver.try_evaluate(row(2, [65], len(CONTEXT), keep_length=len(CONTEXT)))
    assert isinstance(answer, Refusal)


def test_of_the_last_tokens_of_a_row_recurrent_memory_may_keep_a_part() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True, rollback_tokens=2))
    driver.evaluate(row(0, CONTEXT))
    start = len(CONTEXT)
    for tokens, kept in (([65, 66, 67, 68], start + 1), ([65, 66], start)):
        answer = driver.try_evaluate(row(0, tokens, start, keep_length=kept))
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.WRONG_POSITION
        assert f"keep_length must be 0 or >= {max(start + 1, start + len(tokens) - 2)}." in answer.sentence
    driver.evaluate(row(0, [65, 66, 67, 68], start, keep_length=start + 2))
    assert driver.backend.length(0) == start + 2
    check_evaluations(driver.evaluate(row(0, [69], start + 2)), 0, [*CONTEXT, 65, 66, 69], 1)


def test_no_rows_are_a_step_of_nothing_after_the_header(driver: EngineDriver) -> None:
    answer = driver.try_evaluate(release=[0])
    assert isinstance(answer, StepResult)
    assert driver.engine.sequence_count == 0


def test_a_draining_shard_continues_what_it_holds_and_starts_nothing(driver: EngineDriver) -> None:
    driver.engine.draining = True
    driver.evaluate(row(1, [65], copy=PrefixCopy(source_id=0, length=4)), row(0, [66], len(CONTEXT)))
    answer = driver.try_evaluate(row(2, [65]))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.DRAINING
    assert driver.engine.sequence_count == 2
