"""A shard in the same process answers as one over gRPC does: in order, with the same refusals and the same numbers."""

import struct
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from caravan.local_engine import LocalShard
from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Prefill,
    Row,
    RowOutputs,
    RunNote,
    Save,
    SaveEntry,
    SequenceParameters,
)
from caravan_proto.messages.results import Saved, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_router.engine.shard_calls import Reply, ShardCalls, ShardRpcError
from caravan_scheduler.events import Stepped
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.loaded_shard import LoadedShard
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import in_time

PROMPT = tuple(b"a prompt")


@pytest.fixture
async def shard() -> AsyncIterator[LocalShard]:
    loaded = LoadedShard(ShardConfig(backend="fake", cache_ram=64), lambda: ToyBackend(step_s=0.05))
    await loaded.start()
    local = LocalShard("here", loaded.calls)
    await local.lease("test", 1, 60.0)
    yield local
    await local.close()
    await loaded.stop()


def first(sequence_id: int = 0, **fields: object) -> Prefill:
    sampling = SamplingParams(**{"temperature": 0.0, **fields})  # type: ignore[arg-type]
    setup = SequenceParameters(sampling=sampling, prompt_length=len(PROMPT), max_length=1000, ignore_eos=True)
    chunk = Chunk(sequence_id=sequence_id, start=0, token_ids=PROMPT, last=True, setup=setup)
    return Prefill(shard="here", command_id=5, chunks=(chunk,))


async def replies_to(calls: ShardCalls, command: Command, epoch: int = 1) -> list[Reply]:
    return [reply async for replies in await calls.start(command, epoch) for reply in replies]


async def test_the_steps_of_a_sequence_arrive_in_order(shard: LocalShard) -> None:
    [prefilled] = await replies_to(shard, first())
    steps = await replies_to(shard, Decode(command_id=6, sequence_ids=(0,), max_steps=6))
    assert all(isinstance(step, Stepped) and step.outcome is StepOutcome.OK for step in (prefilled, *steps))
    assert (prefilled.shard, prefilled.command_id, steps[0].command_id) == ("here", 5, 6)
    tokens = [token.token_id for step in (prefilled, *steps) if isinstance(step, Stepped) for _, token in step.tokens]
    assert tokens == expected_output(PROMPT, 7, ignore_eos=True)


async def test_steps_that_follow_soon_are_reported_together() -> None:
    loaded = LoadedShard(ShardConfig(backend="fake"), ToyBackend)
    await loaded.start()
    local = LocalShard("here", loaded.calls, reply_interval_ms=3_600_000)
    await local.lease("test", 1, 60.0)
    await replies_to(local, first())
    together = [len(replies) async for replies in await local.start(Decode(sequence_ids=(0,), max_steps=7), 1)]
    # The first is sent at once; the others wait until the command ends.
    assert together == [1, 6]
    await local.close()
    await loaded.stop()


async def test_a_refused_command_raises_its_code_and_a_command_without_a_reply_ends(shard: LocalShard) -> None:
    with pytest.raises(ShardRpcError, match="FAILED_PRECONDITION") as stale:
        await replies_to(shard, first(), epoch=2)
    assert stale.value.error is ShardError.STALE_EPOCH
    with pytest.raises(ShardRpcError, match="NOT_FOUND: sequence 3 is not held here") as unknown:
        await replies_to(shard, Decode(sequence_ids=(3,), max_steps=1))
    assert unknown.value.error is ShardError.UNKNOWN_SEQUENCE
    assert await replies_to(shard, FilterBatch(keep=())) == []
    with pytest.raises(ShardRpcError) as kept:
        await shard.drain(1)
    assert kept.value.error is ShardError.BAD_REQUEST


async def test_numbers_are_those_that_the_wire_would_carry(shard: LocalShard) -> None:
    [step] = await replies_to(shard, first(logprobs=True, top_n_tokens=2))
    assert isinstance(step, Stepped)
    [(_, token)] = step.tokens
    assert token.logprob is not None
    for number in (token.logprob, *(one.logprob for one in token.alternatives)):
        assert struct.unpack("f", struct.pack("f", number)) == (number,)
    row = Row(sequence_id=1, start=0, token_ids=PROMPT, outputs=RowOutputs.LAST, top_n_tokens=2)
    [evaluated] = await replies_to(shard, Evaluate(rows=(row,)))
    assert isinstance(evaluated, Stepped)
    assert evaluated.evaluations == ((1, token.alternatives),)


async def test_a_note_comes_back_with_its_run(shard: LocalShard) -> None:
    await replies_to(shard, first())
    note = RunNote(before=b"b" * 16, tokens=PROMPT, tenant="one", adapter="")
    entry = SaveEntry(sequence_id=0, start=0, cuts=((len(PROMPT), b"k" * 16),), note=note)
    [saved] = await replies_to(shard, Save(shard="here", command_id=9, entries=(entry,)))
    assert isinstance(saved, Saved)
    assert (saved.shard, saved.command_id, saved.saved) == ("here", 9, [True])
    [run] = await shard.saved_runs()
    assert (run.key, tuple(run.note.tokens), run.note.tenant) == (b"k" * 16, PROMPT, "one")


async def test_closing_ends_what_runs_and_what_comes(shard: LocalShard) -> None:
    await replies_to(shard, first())
    running = await shard.start(Decode(sequence_ids=(0,), max_steps=10**6), 1)
    assert await anext(running)
    await shard.close()
    async with in_time("the shard answers"):
        async for _ in running:
            pass
    with pytest.raises(ShardRpcError, match="the connection was closed"):
        await shard.tokenize("a", add_special=True)


async def test_text_vectors_and_status(shard: LocalShard) -> None:
    found = await shard.tokenize("hi", add_special=False)
    assert (await shard.detokenize(found.token_ids)).pieces == found.pieces == (b"h", b"i")
    with pytest.raises(ShardRpcError, match="--embeddings"):
        await shard.embed([found.token_ids])
    assert (shard.tokenizing.texts, shard.embedding.texts) == (0, 0)
    async with in_time("the shard is idle"), aclosing(shard.watch(0.01, 60.0)) as statuses:
        async for status in statuses:
            if not status.busy:  # The worker's thread notes its idleness after the lease's release has been answered.
                break
    assert (status.draining, status.claim) == (False, None)
    info = await shard.info()
    assert (info.epoch, info.leased, info.facts.name) == (1, True, "toy")
