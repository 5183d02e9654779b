"""A refused command returns the right error code and changes nothing."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Row,
    RowOutputs,
    RunSlice,
    Save,
    SaveEntry,
    SetLayout,
)
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SAMPLERS
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.results import Refusal, Result, StepResult
from caravan_testing.shard_builders import (
    EngineDriver,
    first_chunk,
    header,
    load_entry,
    next_chunk,
    row,
    run_key,
    save_entry,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_output

RUNNING, PARTIAL = 0, 1
RELEASED = Header(release=[RUNNING])
PROMPT = toy_prompt("running")
# Runs of the tokens of RUNNING: all of them, and those from 3 on.
KEY, LATER_KEY = run_key(PROMPT), b"later" + bytes(11)


def ask(engine: Engine, command: Command) -> Result | None:
    match command:
        case Prefill():
            return engine.prefill(command, 0)
        case Decode():
            return engine.begin_decode(command)
        case FilterBatch():
            return engine.filter_batch(command)
        case Save():
            return engine.save(command, 0)
        case Evaluate():
            return engine.evaluate(command, 0)
        case Load():
            return engine.load(command, 0)
        case SetLayout():
            return engine.set_layout(command, 0)
        case _:
            raise AssertionError(command)


def new(**fields: Any) -> Prefill:
    """Make a valid command except for ``fields`` of its one chunk."""
    return Prefill(chunks=[replace(first_chunk(3, toy_prompt("new")), **fields)])


def shape(**fields: Any) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"))
    assert chunk.setup is not None
    return Prefill(chunks=[replace(chunk, setup=replace(chunk.setup, **fields))])


def with_prompt_logprobs(*prompts: str, copy: PrefixCopy | None = None) -> Prefill:
    """Prefill prompts with prompt logprobs."""
    chunks = [first_chunk(key, toy_prompt(prompt), copy=copy) for key, prompt in enumerate(prompts, start=2)]
    return Prefill(chunks=[with_parameters(chunk, prompt_logprobs=True) for chunk in chunks])


def adapted(*adapters: str, copy: PrefixCopy | None = None, **fields: Any) -> Prefill:
    """Prefill new sequences with these adapters."""
    chunks = [first_chunk(key, toy_prompt("new"), copy=copy) for key in range(2, 2 + len(adapters))]
    pairs = zip(chunks, adapters, strict=True)
    return Prefill(chunks=[with_parameters(chunk, adapter=adapter) for chunk, adapter in pairs], **fields)


def sampling(**fields: Any) -> Prefill:
    return Prefill(chunks=[first_chunk(3, toy_prompt("new"), **fields)])


def copied(source: int, length: int, start: int | None = None) -> Prefill:
    chunk = first_chunk(3, toy_prompt("new"), copy=PrefixCopy(source_id=source, length=length))
    return Prefill(chunks=[chunk if start is None else replace(chunk, start=start)])


def parked(sequence_id: int, length: int, **fields: Any) -> Prefill:
    return Prefill(chunks=[], header=header(park={sequence_id: length}), **fields)


def taking_over(sequence_id: int, length: int, **fields: Any) -> Prefill:
    chunk = first_chunk(sequence_id, toy_prompt("new"), copy=PrefixCopy(source_id=sequence_id, length=length))
    return Prefill(chunks=[replace(chunk, **fields)])


def evaluating(*rows: Row, **fields: Any) -> Evaluate:
    return Evaluate(rows=rows, header=header(**fields))


def saving(*entries: SaveEntry, **fields: Any) -> Save:
    return Save(entries=entries, **fields)


def save_of(sequence_id: int, start: int, *cuts: int, **fields: Any) -> SaveEntry:
    pairs = tuple((cut, bytes([cut % 256]) * 16) for cut in cuts)
    return replace(SaveEntry(sequence_id=sequence_id, start=start, cuts=pairs), **fields)


def loading(sequence_id: int, length: int, *slices: tuple[int, int], key: bytes = KEY, **fields: Any) -> Load:
    pieces = [RunSlice(key=key, start=start, end=end) for start, end in slices]
    entry = LoadEntry(sequence_id=sequence_id, token_ids=PROMPT[:length], slices=pieces)
    return Load(entries=[replace(entry, **fields)])


def loading_behind(source: int, length: int, *slices: tuple[int, int], **fields: Any) -> Load:
    """Load the rest of PROMPT behind the first tokens of another sequence."""
    tokens = PROMPT[length:]
    return loading(
        3, 7, *slices, **{"token_ids": tokens, "copy": PrefixCopy(source_id=source, length=length), **fields}
    )


CASES: dict[str, tuple[Command, ShardError]] = {
    "chunk id too large": (new(sequence_id=8), ShardError.BAD_REQUEST),
    "chunk listed twice": (Prefill(chunks=[first_chunk(3, [1]), first_chunk(3, [1])]), ShardError.BAD_REQUEST),
    "chunk and rider are one": (
        Prefill(chunks=[next_chunk(PARTIAL, 4, [1])], ride=[PARTIAL]),
        ShardError.BAD_REQUEST,
    ),
    "empty chunk": (new(token_ids=[]), ShardError.BAD_REQUEST),
    "token outside the vocabulary": (new(token_ids=[1, 260]), ShardError.BAD_REQUEST),
    "no parameters": (new(setup=None), ShardError.UNKNOWN_SEQUENCE),
    "first chunk not at 0": (new(start=1), ShardError.WRONG_POSITION),
    "sequence already started": (Prefill(chunks=[first_chunk(PARTIAL, [1])]), ShardError.SEQUENCE_EXISTS),
    "copy into a started sequence": (
        Prefill(chunks=[replace(next_chunk(PARTIAL, 4, [1]), copy=PrefixCopy(source_id=RUNNING, length=4))]),
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
    "rider unknown": (Prefill(chunks=[], ride=[5]), ShardError.UNKNOWN_SEQUENCE),
    "rider released": (
        Prefill(chunks=[], ride=[RUNNING], header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "rider without its prompt": (Prefill(chunks=[], ride=[PARTIAL]), ShardError.NOT_PREFILLED),
    "rider id too large": (Prefill(chunks=[], ride=[2**32 - 1]), ShardError.BAD_REQUEST),
    "too many tokens": (Prefill(chunks=[first_chunk(3, [1] * 64)], ride=[RUNNING]), ShardError.TOO_MANY_TOKENS),
    "release unknown": (replace(new(), header=Header(release=[6])), ShardError.UNKNOWN_SEQUENCE),
    "release twice": (replace(new(), header=Header(release=[RUNNING, RUNNING])), ShardError.BAD_REQUEST),
    "decode unknown": (Decode(sequence_ids=[5], max_steps=1), ShardError.UNKNOWN_SEQUENCE),
    "decode listed twice": (Decode(sequence_ids=[RUNNING, RUNNING], max_steps=1), ShardError.BAD_REQUEST),
    "decode without prompt": (Decode(sequence_ids=[RUNNING, PARTIAL], max_steps=1), ShardError.NOT_PREFILLED),
    "decode no steps": (Decode(sequence_ids=[RUNNING], max_steps=0), ShardError.BAD_REQUEST),
    "keep unknown": (FilterBatch(keep=[RUNNING, 5]), ShardError.UNKNOWN_SEQUENCE),
    "keep released": (
        FilterBatch(keep=[RUNNING], header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "keep listed twice": (FilterBatch(keep=[RUNNING, RUNNING]), ShardError.BAD_REQUEST),
    "park unknown": (parked(5, 1), ShardError.UNKNOWN_SEQUENCE),
    "park id too large": (parked(8, 1), ShardError.BAD_REQUEST),
    "park twice": (
        Prefill(chunks=[], header=Header(park=[(RUNNING, 1)] * 2)),
        ShardError.BAD_REQUEST,
    ),
    "park released": (
        Decode(sequence_ids=[], max_steps=1, header=header(release=[RUNNING], park={RUNNING: 1})),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "park nothing": (parked(RUNNING, 0), ShardError.WRONG_POSITION),
    "park more than is computed": (parked(RUNNING, 8), ShardError.WRONG_POSITION),
    "drop a short key": (
        FilterBatch(keep=[RUNNING, PARTIAL], header=header(drop=[KEY, b"short"])),
        ShardError.BAD_REQUEST,
    ),
    "spill a long key": (
        FilterBatch(keep=[RUNNING, PARTIAL], header=header(spill=[KEY * 2])),
        ShardError.BAD_REQUEST,
    ),
    "continue what is parked": (
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
    "take over without parameters": (taking_over(RUNNING, 4, setup=None), ShardError.UNKNOWN_SEQUENCE),
    "take over what rides": (replace(taking_over(RUNNING, 4), ride=[RUNNING]), ShardError.BAD_REQUEST),
    "save unknown": (saving(save_of(5, 0, 1)), ShardError.UNKNOWN_SEQUENCE),
    "save an id too large": (saving(save_of(8, 0, 1)), ShardError.BAD_REQUEST),
    "save what is released": (saving(save_of(RUNNING, 0, 1), header=RELEASED), ShardError.UNKNOWN_SEQUENCE),
    "save after the release": (
        saving(save_of(RUNNING, 0, 1, release=True), save_of(RUNNING, 1, 2)),
        ShardError.BAD_REQUEST,
    ),
    "save nothing": (saving(save_of(RUNNING, 0)), ShardError.BAD_REQUEST),
    "save from a cut on": (saving(save_of(RUNNING, 4, 4)), ShardError.BAD_REQUEST),
    "save before 0": (saving(save_of(RUNNING, -1, 4)), ShardError.BAD_REQUEST),
    "save with cuts that descend": (saving(save_of(RUNNING, 0, 4, 3)), ShardError.BAD_REQUEST),
    "save with equal cuts": (saving(save_of(RUNNING, 0, 4, 4)), ShardError.BAD_REQUEST),
    "save with a short key": (saving(save_of(RUNNING, 0, cuts=((4, b"short"),))), ShardError.BAD_REQUEST),
    "save a note that is too long": (
        saving(save_of(RUNNING, 0, 4, note=bytes((1 << 23) + 1))),
        ShardError.BAD_REQUEST,
    ),
    "save more than is computed": (saving(save_of(RUNNING, 0, 8)), ShardError.WRONG_POSITION),
    "save more than is parked": (
        saving(save_of(RUNNING, 0, 5), header=header(park={RUNNING: 4})),
        ShardError.WRONG_POSITION,
    ),
    "save the second badly": (
        saving(save_of(RUNNING, 0, 1, release=True), save_of(PARTIAL, 0, 5)),
        ShardError.WRONG_POSITION,
    ),
    "load to a held id": (loading(PARTIAL, 7, (0, 7)), ShardError.SEQUENCE_EXISTS),
    "load to an id too large": (loading(8, 7, (0, 7)), ShardError.BAD_REQUEST),
    "load to an id twice": (
        Load(entries=[*loading(3, 7, (0, 7)).entries, *loading(3, 7, (0, 7)).entries]),
        ShardError.BAD_REQUEST,
    ),
    "load no tokens": (loading(3, 0), ShardError.BAD_REQUEST),
    "load a token outside the vocabulary": (loading(3, 7, (0, 2), token_ids=[1, 260]), ShardError.BAD_REQUEST),
    "load more than fits": (loading(3, 7, (0, 201), token_ids=[1] * 201), ShardError.SEQUENCE_TOO_LONG),
    "load without slices": (loading(3, 7), ShardError.BAD_REQUEST),
    "load not from 0 on": (loading(3, 7, (1, 7)), ShardError.BAD_REQUEST),
    "load with a gap": (loading(3, 7, (0, 3), (4, 7)), ShardError.BAD_REQUEST),
    "load an empty slice": (loading(3, 7, (0, 3), (3, 3), (3, 7)), ShardError.BAD_REQUEST),
    "load slices that end early": (loading(3, 7, (0, 6)), ShardError.BAD_REQUEST),
    "load slices that end late": (loading(3, 6, (0, 7)), ShardError.BAD_REQUEST),
    "load with a long key": (loading(3, 7, (0, 7), key=KEY + b"x"), ShardError.BAD_REQUEST),
    "load more than a run has": (loading(3, 8, (0, 8), token_ids=[1] * 8), ShardError.BAD_REQUEST),
    "load what is before a run": (loading(3, 7, (0, 7), key=LATER_KEY), ShardError.BAD_REQUEST),
    "load behind cells of an unknown sequence": (loading_behind(5, 3, (3, 7)), ShardError.UNKNOWN_SEQUENCE),
    "load behind its own cells": (loading_behind(3, 3, (3, 7)), ShardError.UNKNOWN_SEQUENCE),
    "load behind no cells": (loading_behind(RUNNING, 0, (0, 7)), ShardError.WRONG_POSITION),
    "load behind more than is computed": (loading_behind(PARTIAL, 5, (5, 7)), ShardError.WRONG_POSITION),
    "load behind cells of another adapter": (
        loading_behind(RUNNING, 3, (3, 7), adapter="one"),
        ShardError.BAD_REQUEST,
    ),
    "load behind what is released": (
        replace(loading_behind(RUNNING, 3, (3, 7)), header=RELEASED),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "load shared cells again": (loading_behind(RUNNING, 3, (0, 7)), ShardError.BAD_REQUEST),
    "load with a gap behind shared cells": (loading_behind(RUNNING, 3, (4, 7)), ShardError.BAD_REQUEST),
    "load nothing behind shared cells": (loading_behind(RUNNING, 7), ShardError.BAD_REQUEST),
    "load for an unknown adapter": (loading(3, 7, (0, 7), adapter="none"), ShardError.BAD_REQUEST),
    "load the second badly": (
        Load(entries=[*loading(3, 7, (0, 7)).entries, *loading(PARTIAL, 7, (0, 7)).entries]),
        ShardError.SEQUENCE_EXISTS,
    ),
    "a layout that the shard does not know": (SetLayout(layout=None), ShardError.BAD_REQUEST),
    "release unknown with a layout": (
        SetLayout(layout=KvLayout.UNIFIED, header=Header(release=[6])),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "temperature nan": (sampling(temperature=math.nan), ShardError.BAD_REQUEST),
    "temperature infinite": (sampling(temperature=math.inf), ShardError.BAD_REQUEST),
    "temperature negative": (sampling(temperature=-0.1), ShardError.BAD_REQUEST),
    "top_k too large": (sampling(top_k=2**31), ShardError.BAD_REQUEST),
    "top_p 0": (sampling(top_p=0.0), ShardError.BAD_REQUEST),
    "top_p nan": (sampling(top_p=math.nan), ShardError.BAD_REQUEST),
    "typical_p over 1": (sampling(typical_p=1.01), ShardError.BAD_REQUEST),
    "min_p over 1": (sampling(min_p=1.5), ShardError.BAD_REQUEST),
    "top_n_sigma < 0": (sampling(top_n_sigma=-1.0), ShardError.BAD_REQUEST),
    "dynatemp_range < 0": (sampling(dynatemp_range=-0.5), ShardError.BAD_REQUEST),
    "dynatemp_range inf": (sampling(dynatemp_range=math.inf), ShardError.BAD_REQUEST),
    "dynatemp_exponent nan": (sampling(dynatemp_range=0.5, dynatemp_exponent=math.nan), ShardError.BAD_REQUEST),
    "mirostat 3": (sampling(mirostat=3), ShardError.BAD_REQUEST),
    "mirostat_tau nan": (sampling(mirostat=1, mirostat_tau=math.nan), ShardError.BAD_REQUEST),
    "mirostat_eta < 0": (sampling(mirostat=1, mirostat_eta=-0.5), ShardError.BAD_REQUEST),
    "adaptive_target over 1": (sampling(adaptive_target=1.5), ShardError.BAD_REQUEST),
    "adaptive_decay 1": (sampling(adaptive_target=0.5, adaptive_decay=1.0), ShardError.BAD_REQUEST),
    "mirostat and adaptive_target": (sampling(adaptive_target=0.5, mirostat=1), ShardError.BAD_REQUEST),
    "feedback nan": (shape(feedback=math.nan), ShardError.BAD_REQUEST),
    "feedback inf": (shape(feedback=-math.inf), ShardError.BAD_REQUEST),
    "processors of another process": (sampling(processors=3), ShardError.BAD_REQUEST),
    "samplers incomplete": (sampling(samplers=("top_k", "temperature")), ShardError.BAD_REQUEST),
    "samplers twice": (sampling(samplers=("top_k", *SAMPLERS[1:])), ShardError.BAD_REQUEST),
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
    "a traceparent of another version": (shape(traceparent=f"01-{'a' * 32}-{'b' * 16}-01"), ShardError.BAD_REQUEST),
    "a traceparent with a line break": (shape(traceparent=f"00-{'a' * 32}-{'b' * 16}-01\n"), ShardError.BAD_REQUEST),
    "an unknown adapter": (adapted("none"), ShardError.BAD_REQUEST),
    "two adapters in a step": (adapted("one", "other"), ShardError.BAD_REQUEST),
    "an adapter beside a chunk of none": (
        Prefill(chunks=[*adapted("one").chunks, next_chunk(PARTIAL, 4, toy_prompt("ial ok"))]),
        ShardError.BAD_REQUEST,
    ),
    "an adapter beside a rider of none": (adapted("one", ride=[RUNNING]), ShardError.BAD_REQUEST),
    "copy of what has another adapter": (
        adapted("one", copy=PrefixCopy(source_id=RUNNING, length=4)),
        ShardError.BAD_REQUEST,
    ),
    "take over what has another adapter": (
        Prefill(
            chunks=[
                with_parameters(
                    first_chunk(RUNNING, toy_prompt("new"), copy=PrefixCopy(source_id=RUNNING, length=4)), adapter="one"
                )
            ]
        ),
        ShardError.BAD_REQUEST,
    ),
    "prompt logprobs of too many tokens behind a copy": (
        with_prompt_logprobs("x" * 21, copy=PrefixCopy(source_id=RUNNING, length=4)),
        ShardError.TOO_MANY_TOKENS,
    ),
    "prompt logprobs of too many tokens": (with_prompt_logprobs("x" * 21), ShardError.TOO_MANY_TOKENS),
    "prompt logprobs of too many tokens together": (
        with_prompt_logprobs("x" * 11, "y" * 10),
        ShardError.TOO_MANY_TOKENS,
    ),
    "empty row": (evaluating(row(3, [])), ShardError.BAD_REQUEST),
    "row id too large": (evaluating(row(8, [1])), ShardError.BAD_REQUEST),
    "two rows of a sequence": (evaluating(row(3, [1]), row(3, [1])), ShardError.BAD_REQUEST),
    "row with a token outside the vocabulary": (evaluating(row(3, [260])), ShardError.BAD_REQUEST),
    "row with unknown outputs": (evaluating(row(3, [1], outputs=None)), ShardError.BAD_REQUEST),
    "row with too many alternatives": (evaluating(row(3, [1], top_n_tokens=33)), ShardError.BAD_REQUEST),
    "row with too many scored ids": (evaluating(row(3, [1], score_token_ids=[1] * 257)), ShardError.BAD_REQUEST),
    "row with a scored id outside the vocabulary": (
        evaluating(row(3, [1], score_token_ids=[260])),
        ShardError.BAD_REQUEST,
    ),
    "alternatives of a row without outputs": (
        evaluating(row(3, [1], outputs=RowOutputs.NONE, top_n_tokens=1)),
        ShardError.BAD_REQUEST,
    ),
    "scored ids of a row without outputs": (
        evaluating(row(3, [1], outputs=RowOutputs.NONE, score_token_ids=[1])),
        ShardError.BAD_REQUEST,
    ),
    "new row not at 0": (evaluating(row(3, [1], 1)), ShardError.WRONG_POSITION),
    "row not behind its copy": (
        evaluating(replace(row(3, [1], copy=PrefixCopy(source_id=RUNNING, length=4)), start=3)),
        ShardError.WRONG_POSITION,
    ),
    "row not where the sequence ends": (evaluating(row(RUNNING, [1], 6, keep_length=6)), ShardError.WRONG_POSITION),
    "row that a running sequence would keep": (evaluating(row(RUNNING, [1], 7)), ShardError.WRONG_POSITION),
    "row that a running sequence would be cut back with": (
        evaluating(row(RUNNING, [1], 7, keep_length=5)),
        ShardError.WRONG_POSITION,
    ),
    "row that would release a running sequence": (
        evaluating(row(RUNNING, [1], 7, keep_length=0)),
        ShardError.WRONG_POSITION,
    ),
    "row that a partial prompt would keep": (evaluating(row(PARTIAL, [1], 4)), ShardError.WRONG_POSITION),
    "row that keeps more than it has": (evaluating(row(3, [1], keep_length=2)), ShardError.WRONG_POSITION),
    "row that copies into a held sequence": (
        evaluating(row(PARTIAL, [1], copy=PrefixCopy(source_id=RUNNING, length=4))),
        ShardError.SEQUENCE_EXISTS,
    ),
    "row that copies what is not held": (
        evaluating(row(3, [1], copy=PrefixCopy(source_id=4, length=4))),
        ShardError.UNKNOWN_SEQUENCE,
    ),
    "row that copies too much": (
        evaluating(row(3, [1], copy=PrefixCopy(source_id=RUNNING, length=8))),
        ShardError.WRONG_POSITION,
    ),
    "row with an adapter that is not here": (evaluating(row(3, [1], adapter="none")), ShardError.BAD_REQUEST),
    "row with another adapter than its copy": (
        evaluating(row(3, [1], copy=PrefixCopy(source_id=RUNNING, length=4), adapter="one")),
        ShardError.BAD_REQUEST,
    ),
    "row with another adapter than its sequence": (
        evaluating(row(RUNNING, [1], 7, keep_length=7, adapter="one")),
        ShardError.BAD_REQUEST,
    ),
    "rows with two adapters": (evaluating(row(3, [1]), row(4, [1], adapter="one")), ShardError.BAD_REQUEST),
    "rows with too many tokens": (
        evaluating(row(3, [1] * 40, outputs=RowOutputs.LAST), row(4, [1] * 25, outputs=RowOutputs.LAST)),
        ShardError.TOO_MANY_TOKENS,
    ),
    "rows with too many outputs": (evaluating(row(3, [1] * 11), row(4, [1] * 10)), ShardError.TOO_MANY_TOKENS),
    "row beyond the cells of a sequence": (evaluating(row(3, [1] * 201)), ShardError.SEQUENCE_TOO_LONG),
    "row behind a header that releases its sequence": (
        evaluating(row(RUNNING, [1], 7, keep_length=7), release=[RUNNING]),
        ShardError.WRONG_POSITION,
    ),
    "too many alternatives": (sampling(logprobs=True, top_n_tokens=33), ShardError.BAD_REQUEST),
    "alternatives without logprobs": (sampling(top_n_tokens=1), ShardError.BAD_REQUEST),
}


@pytest.fixture
def driver() -> EngineDriver:
    """A shard with a running and a partly prefilled sequence, and two saved runs."""
    backend = ToyBackend(
        cells=200,
        max_batch_tokens=64,
        max_prompt_logprob_tokens=20,
        adapters=["one", "other"],
        other_layouts=[KvLayout.SPLIT],
    )
    driver = EngineDriver(backend)
    driver.prefill(first_chunk(2, PROMPT, ignore_eos=True))
    driver.save(save_entry(2, PROMPT), save_of(2, 3, cuts=((7, LATER_KEY),), release=True))
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
    # The runs are as before.
    assert [run.key for run, _ in driver.engine.runs.list_runs()] == [KEY, LATER_KEY]
    assert driver.load(load_entry(2, PROMPT)) == [True]
    driver.prefill(first_chunk(2, PROMPT[6:], copy=PrefixCopy(source_id=2, length=6), ignore_eos=True))
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


def test_a_draining_shard_starts_and_loads_no_sequence_and_saves_them(driver: EngineDriver) -> None:
    driver.engine.draining = True
    for command in (taking_over(RUNNING, 4), loading(3, 7, (0, 7))):
        answer = ask(driver.engine, command)
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.DRAINING
    assert driver.save(save_of(RUNNING, 0, 7, release=True)) == [True]


def test_cells_that_cannot_be_shared_are_loaded_whole() -> None:
    driver = EngineDriver(ToyBackend(layout=KvLayout.SPLIT))
    driver.prefill(first_chunk(RUNNING, PROMPT, ignore_eos=True))
    driver.save(save_entry(RUNNING, PROMPT))
    answer = ask(driver.engine, loading_behind(RUNNING, 3, (3, 7)))
    assert isinstance(answer, Refusal)
    assert answer.error is ShardError.BAD_REQUEST
    assert "unified layout" in answer.sentence
    assert driver.load(load_entry(3, PROMPT)) == [True]


def test_a_recurrent_model_parks_only_whole_sequences() -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
    driver.prefill(first_chunk(RUNNING, PROMPT, ignore_eos=True))
    for command in (parked(RUNNING, 3), taking_over(RUNNING, 3)):
        answer = driver.engine.prefill(command, 0)
        assert isinstance(answer, Refusal)
        assert answer.error is ShardError.WRONG_POSITION
    driver.decode([RUNNING])
    assert driver.output[RUNNING] == expected_output(PROMPT, 50, ignore_eos=True)


@pytest.mark.parametrize("make", [lambda: copied(RUNNING, 4), lambda: copied(RUNNING, 7)])
def test_a_recurrent_model_shares_only_whole_sequences(make: Callable[[], Prefill]) -> None:
    driver = EngineDriver(ToyBackend(whole_only=True))
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
