"""A refused command returns the right error code and changes nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Prefix, PrefixSharing
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.engine import Engine
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.commands import (
    Chunk,
    Command,
    Decode,
    FilterBatch,
    Header,
    Park,
    Prefill,
    SwapIn,
    SwapInEntry,
    SwapOut,
    SwapOutEntry,
)
from caravan_shard.protocol.results import Refusal, Result, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, header, next_chunk, toy_prompt, with_parameters
from caravan_testing.toy_oracle import expected_output

RUNNING, PARTIAL = 0, 1
# A swapped sequence with the same beginning as RUNNING, and where its state starts.
HANDLE, SUFFIX_START = 7, 3
RELEASED = Header(release_ids=[RUNNING])
PROMPT = toy_prompt("running")


def ask(engine: Engine, command: Command) -> Result | None:
    match command:
        case Prefill():
            return engine.prefill(command, 0)
        case Decode():
            return engine.begin_decode(command)
        case FilterBatch():
            return engine.filter_batch(command)
        case SwapOut():
            return engine.swap_out(command, 0)
        case SwapIn():
            return engine.swap_in(command, 0)
        case _:
            raise AssertionError(command)


def new(**fields: Any) -> Prefill:
    """Make a valid command except for ``fields`` of its one chunk."""
    return Prefill(chunks=[replace(first_chunk(3, toy_prompt("new")), **fields)])


def shape(**fields: Any) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"))
    assert chunk.parameters is not None
    return Prefill(chunks=[replace(chunk, parameters=replace(chunk.parameters, **fields))])


def with_prompt_logprobs(*prompts: str, copy: Prefix | None = None) -> Prefill:
    """Prefill prompts with prompt logprobs."""
    chunks = [first_chunk(key, toy_prompt(prompt), copy=copy) for key, prompt in enumerate(prompts, start=2)]
    return Prefill(chunks=[with_parameters(chunk, prompt_logprobs=True) for chunk in chunks])


def adapted(*adapters: str, copy: Prefix | None = None, **fields: Any) -> Prefill:
    """Prefill new sequences with these adapters."""
    chunks = [first_chunk(key, toy_prompt("new"), copy=copy) for key in range(2, 2 + len(adapters))]
    pairs = zip(chunks, adapters, strict=True)
    return Prefill(chunks=[with_parameters(chunk, adapter=adapter) for chunk, adapter in pairs], **fields)


def sampling(**fields: Any) -> Prefill:
    return Prefill(chunks=[first_chunk(3, toy_prompt("new"), **fields)])


def copied(source: int, length: int, start: int | None = None) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"), copy=Prefix(source_id=source, length=length))
    return Prefill(chunks=[chunk if start is None else replace(chunk, start=start)])


def parked(sequence_id: int, length: int, **fields: Any) -> Prefill:
    return Prefill(chunks=[], header=header(park={sequence_id: length}), **fields)


def taking_over(sequence_id: int, length: int, **fields: Any) -> Prefill:
    chunk = first_chunk(sequence_id, toy_prompt("new"), copy=Prefix(source_id=sequence_id, length=length))
    return Prefill(chunks=[replace(chunk, **fields)])


def swap_out(*entries: tuple[int, int, int], **fields: Any) -> SwapOut:
    return SwapOut(
        entries=[SwapOutEntry(sequence_id=key, handle=at, start=start) for key, at, start in entries], **fields
    )


def swap_in(sequence_id: int, source: int | None, length: int, handle: int = HANDLE, **fields: Any) -> SwapIn:
    copy = Prefix(source_id=source, length=length) if source is not None else None
    return SwapIn(entries=[SwapInEntry(handle=handle, sequence_id=sequence_id, copy=copy)], **fields)


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
    "sequence already started": (Prefill(chunks=[first_chunk(PARTIAL, [1])]), ShardError.SEQUENCE_EXISTS),
    "copy into a started sequence": (
        Prefill(chunks=[replace(next_chunk(PARTIAL, 4, [1]), copy=Prefix(source_id=RUNNING, length=4))]),
        ShardError.SEQUENCE_EXISTS,
    ),
    "a hole in the prompt": (Prefill(chunks=[next_chunk(PARTIAL, 5, [1])]), ShardError.WRONG_POSITION),
    "a repeated chunk": (Prefill(chunks=[next_chunk(PARTIAL, 3, [1])]), ShardError.WRONG_POSITION),
    "prompt complete already": (Prefill(chunks=[next_chunk(RUNNING, 7, [1])]), ShardError.WRONG_POSITION),
    "prompt longer than announced": (Prefill(chunks=[next_chunk(PARTIAL, 4, [1] * 56)]), ShardError.BAD_REQUEST),
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
    "park unknown": (parked(5, 1), ShardError.UNKNOWN_SEQUENCE),
    "park id too large": (parked(8, 1), ShardError.BAD_REQUEST),
    "park twice": (
        Prefill(chunks=[], header=Header(parks=[Park(sequence_id=RUNNING, length=1)] * 2)),
        ShardError.BAD_REQUEST,
    ),
    "park released": (
        Decode(sequence_ids=[], max_steps=1, header=header(release=[RUNNING], park={RUNNING: 1})),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "park nothing": (parked(RUNNING, 0), ShardError.WRONG_POSITION),
    "park more than is computed": (parked(RUNNING, 8), ShardError.WRONG_POSITION),
    "drop a handle out of range": (
        FilterBatch(keep_ids=[RUNNING, PARTIAL], header=header(drop=[2**64])),
        ShardError.BAD_REQUEST,
    ),
    "go on with what is parked": (
        Prefill(chunks=[next_chunk(PARTIAL, 4, [1])], header=header(park={PARTIAL: 4})),
        ShardError.WRONG_POSITION,
    ),
    "copy more than is parked": (
        replace(copied(RUNNING, 5), header=header(park={RUNNING: 4})),
        ShardError.WRONG_POSITION,
    ),
    "take over nothing": (taking_over(5, 4), ShardError.UNKNOWN_SEQUENCE),
    "take over what is released": (replace(taking_over(RUNNING, 4), header=RELEASED), ShardError.UNKNOWN_SEQUENCE),
    "take over no token": (taking_over(RUNNING, 0, start=0), ShardError.WRONG_POSITION),
    "take over more than is computed": (taking_over(RUNNING, 8), ShardError.WRONG_POSITION),
    "take over at another position": (taking_over(RUNNING, 4, start=5), ShardError.WRONG_POSITION),
    "take over without parameters": (taking_over(RUNNING, 4, parameters=None), ShardError.UNKNOWN_SEQUENCE),
    "take over what rides": (replace(taking_over(RUNNING, 4), rider_ids=[RUNNING]), ShardError.BAD_REQUEST),
    "swap out unknown": (swap_out((5, 1, 0)), ShardError.UNKNOWN_SEQUENCE),
    "swap out twice": (swap_out((RUNNING, 1, 0), (RUNNING, 2, 0)), ShardError.BAD_REQUEST),
    "swap out under one handle": (swap_out((RUNNING, 1, 0), (PARTIAL, 1, 0)), ShardError.BAD_REQUEST),
    "swap out under a handle in use": (swap_out((RUNNING, HANDLE, 0)), ShardError.BAD_REQUEST),
    "swap out under a handle out of range": (swap_out((RUNNING, 2**64, 0)), ShardError.BAD_REQUEST),
    "swap out from behind the end": (swap_out((RUNNING, 1, 8)), ShardError.WRONG_POSITION),
    "swap out from behind what is parked": (
        swap_out((RUNNING, 1, 5), header=header(park={RUNNING: 4})),
        ShardError.WRONG_POSITION,
    ),
    "swap out the second badly": (swap_out((RUNNING, 1, 0), (PARTIAL, 2, 5)), ShardError.WRONG_POSITION),
    "swap in to a held id": (swap_in(PARTIAL, RUNNING, SUFFIX_START), ShardError.SEQUENCE_EXISTS),
    "swap in to an id too large": (swap_in(8, RUNNING, SUFFIX_START), ShardError.BAD_REQUEST),
    "swap in twice": (
        SwapIn(
            entries=[
                SwapInEntry(handle=HANDLE, sequence_id=key, copy=Prefix(source_id=RUNNING, length=SUFFIX_START))
                for key in (3, 4)
            ]
        ),
        ShardError.BAD_REQUEST,
    ),
    "swap in without the prefix": (swap_in(3, None, 0), ShardError.BAD_REQUEST),
    "swap in behind another length": (swap_in(3, RUNNING, SUFFIX_START + 1), ShardError.BAD_REQUEST),
    "swap in behind other tokens": (swap_in(3, PARTIAL, SUFFIX_START), ShardError.BAD_REQUEST),
    "swap in behind an unknown sequence": (swap_in(3, 5, SUFFIX_START), ShardError.UNKNOWN_SEQUENCE),
    "swap in behind itself": (swap_in(3, 3, SUFFIX_START), ShardError.UNKNOWN_SEQUENCE),
    "swap in behind what is parked shorter": (
        swap_in(3, RUNNING, SUFFIX_START, header=header(park={RUNNING: 2})),
        ShardError.WRONG_POSITION,
    ),
    "swap in an unknown handle behind too much": (swap_in(3, RUNNING, 9, handle=99), ShardError.WRONG_POSITION),
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
    "repeat_last_n negative": (sampling(repeat_last_n=-2), ShardError.BAD_REQUEST),
    "repeat_last_n too large": (sampling(repeat_last_n=2**31), ShardError.BAD_REQUEST),
    "dry_multiplier nan": (sampling(dry_multiplier=math.nan), ShardError.BAD_REQUEST),
    "dry_multiplier negative": (sampling(dry_multiplier=-0.5), ShardError.BAD_REQUEST),
    "dry_base below 1": (sampling(dry_multiplier=1.0, dry_base=0.99), ShardError.BAD_REQUEST),
    "dry_base infinite": (sampling(dry_multiplier=1.0, dry_base=math.inf), ShardError.BAD_REQUEST),
    "dry_allowed_length too large": (sampling(dry_multiplier=1.0, dry_allowed_length=2**31), ShardError.BAD_REQUEST),
    "dry_penalty_last_n too large": (sampling(dry_multiplier=1.0, dry_penalty_last_n=2**31), ShardError.BAD_REQUEST),
    "xtc_probability over 1": (sampling(xtc_probability=1.01), ShardError.BAD_REQUEST),
    "xtc_probability nan": (sampling(xtc_probability=math.nan), ShardError.BAD_REQUEST),
    "xtc_threshold negative": (sampling(xtc_threshold=-0.1), ShardError.BAD_REQUEST),
    "too many stop_token_ids": (shape(stop_token_ids=frozenset(range(65))), ShardError.BAD_REQUEST),
    "a stop token outside the vocabulary": (shape(stop_token_ids=frozenset({260})), ShardError.BAD_REQUEST),
    "more min_tokens than can be": (shape(min_tokens=51), ShardError.BAD_REQUEST),
    "an unknown adapter": (adapted("none"), ShardError.BAD_REQUEST),
    "two adapters in a step": (adapted("one", "other"), ShardError.BAD_REQUEST),
    "an adapter beside a chunk of none": (
        Prefill(chunks=[*adapted("one").chunks, next_chunk(PARTIAL, 4, toy_prompt("ial ok"))]),
        ShardError.BAD_REQUEST,
    ),
    "an adapter beside a rider of none": (adapted("one", rider_ids=[RUNNING]), ShardError.BAD_REQUEST),
    "copy of what has another adapter": (
        adapted("one", copy=Prefix(source_id=RUNNING, length=4)),
        ShardError.BAD_REQUEST,
    ),
    "take over what has another adapter": (
        Prefill(
            chunks=[
                with_parameters(
                    first_chunk(RUNNING, toy_prompt("new"), copy=Prefix(source_id=RUNNING, length=4)), adapter="one"
                )
            ]
        ),
        ShardError.BAD_REQUEST,
    ),
    "prompt logprobs of a copy": (
        with_prompt_logprobs("new", copy=Prefix(source_id=RUNNING, length=4)),
        ShardError.BAD_REQUEST,
    ),
    "prompt logprobs of too many tokens": (with_prompt_logprobs("x" * 21), ShardError.TOO_MANY_TOKENS),
    "prompt logprobs of too many tokens together": (
        with_prompt_logprobs("x" * 11, "y" * 10),
        ShardError.TOO_MANY_TOKENS,
    ),
    "too many alternatives": (sampling(logprobs=True, top_n_tokens=33), ShardError.BAD_REQUEST),
    "alternatives without logprobs": (sampling(top_n_tokens=1), ShardError.BAD_REQUEST),
}


@pytest.fixture
def driver() -> EngineDriver:
    """A shard with a running, a partly prefilled and a swapped sequence."""
    driver = EngineDriver(
        ToyBackend(cells=200, max_batch_tokens=64, max_prompt_logprob_tokens=20, adapters=["one", "other"])
    )
    driver.prefill(first_chunk(2, PROMPT, ignore_eos=True))
    driver.swap_out(SwapOutEntry(sequence_id=2, handle=HANDLE, start=SUFFIX_START))
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
    # The swapped sequence can still be restored.
    again = swap_in(2, RUNNING, SUFFIX_START)
    assert driver.swap_in(*again.entries) == [True]
    driver.decode([2])
    assert driver.output[2] == expected_output(PROMPT, 50, ignore_eos=True)


def test_every_second_chunk_is_checked_before_the_first_is_taken(driver: EngineDriver) -> None:
    good, bad = first_chunk(3, toy_prompt("good")), first_chunk(4, [999])
    answer = driver.try_prefill(good, bad, release=[RUNNING])
    assert isinstance(answer, Refusal)
    assert driver.engine.sequence_count == 2


def test_a_draining_shard_refuses_new_sequences_and_continues_the_others(driver: EngineDriver) -> None:
    driver.engine.draining = True
    answer = driver.try_prefill(first_chunk(3, toy_prompt("new")))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.DRAINING
    driver.prefill(next_chunk(PARTIAL, 4, toy_prompt("ial ok")), riders=[RUNNING])
    assert len(driver.decode([RUNNING, PARTIAL], steps=3)) == 3


def test_a_draining_shard_restores_swapped_sequences_and_starts_none_in_their_place(driver: EngineDriver) -> None:
    driver.engine.draining = True
    answer = driver.engine.prefill(taking_over(RUNNING, 4), 0)
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.DRAINING
    assert driver.swap_in(*swap_in(3, RUNNING, SUFFIX_START).entries) == [True]


def test_a_split_cache_saves_only_whole_sequences() -> None:
    driver = EngineDriver(ToyBackend(layout=KvLayout.SPLIT))
    driver.prefill(first_chunk(RUNNING, PROMPT, ignore_eos=True))
    answer = driver.engine.swap_out(swap_out((RUNNING, 1, 2)), 0)
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.BAD_REQUEST
    assert driver.engine.sequence_count == 1


def test_a_recurrent_model_parks_only_whole_sequences() -> None:
    driver = EngineDriver(ToyBackend(sharing=PrefixSharing.WHOLE_ONLY))
    driver.prefill(first_chunk(RUNNING, PROMPT, ignore_eos=True))
    for command in (parked(RUNNING, 3), taking_over(RUNNING, 3)):
        answer = driver.engine.prefill(command, 0)
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.WRONG_POSITION
    driver.decode([RUNNING])
    assert driver.output[RUNNING] == expected_output(PROMPT, 50, ignore_eos=True)


@pytest.mark.parametrize("make", [lambda: copied(RUNNING, 4), lambda: copied(RUNNING, 7)])
def test_a_recurrent_model_shares_only_whole_sequences(make: Callable[[], Prefill]) -> None:
    driver = EngineDriver(ToyBackend(sharing=PrefixSharing.WHOLE_ONLY))
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
