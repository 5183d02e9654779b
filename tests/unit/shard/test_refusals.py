"""Each refusal has its code and changes nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Prefix, PrefixSharing
from caravan_shard.backends.fake import FakeBackend, expected_output
from caravan_shard.commands import Chunk, Command, Decode, FilterBatch, Header, Prefill
from caravan_shard.engine import Engine
from caravan_shard.results import Holdings, Refusal, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk, toy_prompt

RUNNING, PARTIAL = 0, 1
RELEASED = Header(release_ids=[RUNNING])
PROMPT = toy_prompt("running")


def ask(engine: Engine, command: Command) -> StepResult | Holdings | Refusal | None:
    match command:
        case Prefill():
            return engine.prefill(command, 0)
        case Decode():
            return engine.begin_decode(command)
        case FilterBatch():
            return engine.filter_batch(command)
        case _:
            raise AssertionError(command)


def new(**fields: Any) -> Prefill:
    """A sound command, but for ``fields`` of its one chunk."""
    return Prefill(chunks=[replace(first_chunk(3, toy_prompt("new")), **fields)])


def shape(**fields: Any) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"))
    assert chunk.parameters is not None
    return Prefill(chunks=[replace(chunk, parameters=replace(chunk.parameters, **fields))])


def sampling(**fields: Any) -> Prefill:
    return Prefill(chunks=[first_chunk(3, toy_prompt("new"), **fields)])


def copied(source: int, length: int, start: int | None = None) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"), copy=Prefix(source_id=source, length=length))
    return Prefill(chunks=[chunk if start is None else replace(chunk, start=start)])


CASES: dict[str, tuple[Command, ShardError]] = {
    "chunk id too large": (new(sequence_id=8), ShardError.BAD_REQUEST),
    "chunk listed twice": (Prefill(chunks=[first_chunk(3, [1]), first_chunk(3, [1])]), ShardError.BAD_REQUEST),
    "chunk and rider are one": (
        Prefill(chunks=[next_chunk(PARTIAL, 4, [1])], rider_ids=[PARTIAL]),
        ShardError.BAD_REQUEST,
    ),
    "empty chunk": (new(tokens=[]), ShardError.BAD_REQUEST),
    "token outside the vocabulary": (new(tokens=[1, 260]), ShardError.BAD_REQUEST),
    "no parameters": (new(parameters=None), ShardError.UNKNOWN_SEQUENCE),
    "first chunk not at 0": (new(start=1), ShardError.WRONG_POSITION),
    "begun already": (Prefill(chunks=[first_chunk(PARTIAL, [1])]), ShardError.SEQUENCE_EXISTS),
    "copy into a sequence that began": (
        Prefill(chunks=[replace(next_chunk(PARTIAL, 4, [1]), copy=Prefix(source_id=RUNNING, length=4))]),
        ShardError.SEQUENCE_EXISTS,
    ),
    "a hole in the prompt": (Prefill(chunks=[next_chunk(PARTIAL, 5, [1])]), ShardError.WRONG_POSITION),
    "a repeated chunk": (Prefill(chunks=[next_chunk(PARTIAL, 3, [1])]), ShardError.WRONG_POSITION),
    "prompt complete already": (Prefill(chunks=[next_chunk(RUNNING, 7, [1])]), ShardError.WRONG_POSITION),
    "prompt longer than it said": (Prefill(chunks=[next_chunk(PARTIAL, 4, [1] * 56)]), ShardError.BAD_REQUEST),
    "last chunk before the prompt's end": (
        Prefill(chunks=[next_chunk(PARTIAL, 4, [1] * 5)]),
        ShardError.BAD_REQUEST,
    ),
    "prompt_length 0": (shape(prompt_length=0), ShardError.BAD_REQUEST),
    "prompt_length over max_length": (shape(prompt_length=60), ShardError.BAD_REQUEST),
    "max_length over the cells": (shape(max_length=202), ShardError.SEQUENCE_TOO_LONG),
    "copy of an unknown sequence": (copied(5, 4), ShardError.UNKNOWN_SEQUENCE),
    "copy of itself": (copied(3, 4), ShardError.UNKNOWN_SEQUENCE),
    "copy of nothing": (copied(RUNNING, 0), ShardError.WRONG_POSITION),
    "copy of more than is computed": (copied(RUNNING, 8), ShardError.WRONG_POSITION),
    "copy and start differ": (copied(RUNNING, 4, start=3), ShardError.WRONG_POSITION),
    "copy of what is released": (
        replace(copied(RUNNING, 4), header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "rider unknown": (Prefill(chunks=[], rider_ids=[5]), ShardError.UNKNOWN_SEQUENCE),
    "rider released": (
        Prefill(chunks=[], rider_ids=[RUNNING], header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "rider without its prompt": (Prefill(chunks=[], rider_ids=[PARTIAL]), ShardError.NOT_PREFILLED),
    "rider id too large": (Prefill(chunks=[], rider_ids=[2**32 - 1]), ShardError.BAD_REQUEST),
    "too many tokens": (Prefill(chunks=[first_chunk(3, [1] * 64)], rider_ids=[RUNNING]), ShardError.TOO_MANY_TOKENS),
    "release unknown": (replace(new(), header=Header(release_ids=[6])), ShardError.UNKNOWN_SEQUENCE),
    "release twice": (replace(new(), header=Header(release_ids=[RUNNING, RUNNING])), ShardError.BAD_REQUEST),
    "decode unknown": (Decode(sequence_ids=[5], max_steps=1), ShardError.UNKNOWN_SEQUENCE),
    "decode listed twice": (Decode(sequence_ids=[RUNNING, RUNNING], max_steps=1), ShardError.BAD_REQUEST),
    "decode without prompt": (Decode(sequence_ids=[RUNNING, PARTIAL], max_steps=1), ShardError.NOT_PREFILLED),
    "decode no steps": (Decode(sequence_ids=[RUNNING], max_steps=0), ShardError.BAD_REQUEST),
    "keep unknown": (FilterBatch(keep_ids=[RUNNING, 5]), ShardError.UNKNOWN_SEQUENCE),
    "keep released": (
        FilterBatch(keep_ids=[RUNNING], header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "keep listed twice": (FilterBatch(keep_ids=[RUNNING, RUNNING]), ShardError.BAD_REQUEST),
    "temperature nan": (sampling(temperature=math.nan), ShardError.BAD_REQUEST),
    "temperature infinite": (sampling(temperature=math.inf), ShardError.BAD_REQUEST),
    "temperature negative": (sampling(temperature=-0.1), ShardError.BAD_REQUEST),
    "top_k too large": (sampling(top_k=2**31), ShardError.BAD_REQUEST),
    "top_p 0": (sampling(top_p=0.0), ShardError.BAD_REQUEST),
    "top_p nan": (sampling(top_p=math.nan), ShardError.BAD_REQUEST),
    "typical_p over 1": (sampling(typical_p=1.01), ShardError.BAD_REQUEST),
    "min_p over 1": (sampling(min_p=1.5), ShardError.BAD_REQUEST),
    "min_p nan": (sampling(min_p=math.nan), ShardError.BAD_REQUEST),
    "repetition_penalty 0": (sampling(repetition_penalty=0.0), ShardError.BAD_REQUEST),
    "frequency_penalty infinite": (sampling(frequency_penalty=-math.inf), ShardError.BAD_REQUEST),
    "presence_penalty nan": (sampling(presence_penalty=math.nan), ShardError.BAD_REQUEST),
    "too many alternatives": (sampling(logprobs=True, top_n_tokens=33), ShardError.BAD_REQUEST),
    "alternatives without logprobs": (sampling(top_n_tokens=1), ShardError.BAD_REQUEST),
}


@pytest.fixture
def driver() -> EngineDriver:
    """One sequence that runs and one in the middle of its prompt."""
    driver = EngineDriver(FakeBackend(cells=200, max_batch_tokens=64))
    driver.prefill(
        first_chunk(RUNNING, PROMPT, ignore_eos=True), first_chunk(PARTIAL, toy_prompt("part"), total=10, last=False)
    )
    return driver


@pytest.mark.parametrize("name", CASES)
def test_a_refused_command_changes_nothing(driver: EngineDriver, name: str) -> None:
    command, error = CASES[name]
    used = driver.backend.cache.used

    answer = ask(driver.engine, command)

    assert isinstance(answer, Refusal), answer
    assert answer.error is error, answer
    assert driver.backend.cache.used == used
    assert driver.keep(RUNNING, PARTIAL).sequence_ids == [RUNNING, PARTIAL]
    driver.prefill(next_chunk(PARTIAL, 4, toy_prompt("ial ok")))
    driver.decode([RUNNING, PARTIAL])
    assert driver.output[RUNNING] == expected_output(PROMPT, 50, ignore_eos=True)
    assert driver.output[PARTIAL] == expected_output(toy_prompt("partial ok"), 50)


def test_every_second_chunk_is_checked_before_the_first_is_taken(driver: EngineDriver) -> None:
    good, bad = first_chunk(3, toy_prompt("good")), first_chunk(4, [999])
    answer = driver.try_prefill(good, bad, release=[RUNNING])
    assert isinstance(answer, Refusal)
    assert driver.engine.sequence_count == 2


def test_a_draining_shard_refuses_new_sequences_and_goes_on_with_the_others(driver: EngineDriver) -> None:
    driver.engine.draining = True
    answer = driver.try_prefill(first_chunk(3, toy_prompt("new")))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.DRAINING
    driver.prefill(next_chunk(PARTIAL, 4, toy_prompt("ial ok")), riders=[RUNNING])
    assert len(driver.decode([RUNNING, PARTIAL], steps=3)) == 3


@pytest.mark.parametrize("make", [lambda: copied(RUNNING, 4), lambda: copied(RUNNING, 7)])
def test_a_recurrent_model_shares_only_whole_sequences(make: Callable[[], Prefill]) -> None:
    driver = EngineDriver(FakeBackend(sharing=PrefixSharing.WHOLE_ONLY))
    driver.prefill(first_chunk(RUNNING, PROMPT))
    command = make()
    chunk: Chunk = command.chunks[0]
    assert chunk.copy is not None
    answer = ask(driver.engine, command)
    if chunk.copy.length == len(PROMPT):
        assert isinstance(answer, StepResult)
    else:
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.WRONG_POSITION
