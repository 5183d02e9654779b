"""Prompt logprobs on the toy model, with prompts in chunks and other sequences in the same steps."""

import numpy as np
import pytest

from caravan_proto.messages.commands import Chunk, PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import StepOutcome
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_shard.protocol.results import PromptLogprobs, Refusal, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_logprobs, expected_output

PROMPT = toy_prompt("a prompt with its log probabilities")
TOP = 3
VOCABULARY = ToyVocabulary()


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
