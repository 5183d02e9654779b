"""Saved runs move from shard to shard, and a shard drains until its router gives it back, over gRPC."""

import asyncio
import threading

import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.sequences.runs import RunStore
from caravan_testing.shard_builders import run_key
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import in_time

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = b"a prompt to move " * 8
OTHER = b"another prompt"


async def save(shard: RunningShard, prompt: bytes) -> None:
    await shard.take(shard.epoch + 1)
    await shard.prefill(prompt_chunk(0, prompt, ignore_eos=True))
    entry = shard_pb2.SaveEntry(sequence_id=0, cuts=[len(prompt)], keys=[run_key(prompt)], release=True)
    assert list((await shard.save(entry)).saved) == [True]


def fetch(target: RunningShard, source: RunningShard, *prompts: bytes, **fields: int) -> shard_pb2.FetchRunsRequest:
    keys = [run_key(prompt) for prompt in prompts]
    request = shard_pb2.FetchRunsRequest(
        epoch=target.epoch, source_address=source.address, source_epoch=source.epoch, keys=keys
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


async def test_a_run_that_was_fetched_is_loaded_and_continued() -> None:
    async with running_shard() as source, running_shard() as target:
        assert (await source.stub.Info(shard_pb2.InfoRequest())).limits.run_fingerprint == "70" * 32
        await save(source, PROMPT)
        await target.take()
        # Another sequence decodes meanwhile.
        await target.prefill(prompt_chunk(7, OTHER, ignore_eos=True))
        decoding = target.decode([7])
        await decoding.initial_metadata()
        response = await target.stub.FetchRuns(fetch(target, source, PROMPT))
        assert list(response.fetched) == [True]
        assert response.total_ns > 0
        output = [token async for reply in decoding for step in reply.steps for token in step.tokens.token_ids]
        assert output == expected_output(OTHER, 50, ignore_eos=True)[1:]
        assert await target.runs() == [(run_key(PROMPT), 0, len(PROMPT), False)]
        piece = shard_pb2.RunSlice(key=run_key(PROMPT), start=0, end=len(PROMPT))
        await target.load(shard_pb2.LoadEntry(sequence_id=1, token_ids=PROMPT, slices=[piece]))
        copy = types_pb2.PrefixCopy(source_sequence_id=1, length=len(PROMPT) - 1)
        first = await target.prefill(prompt_chunk(1, PROMPT[-1:], copy=copy))
        assert list(first.tokens.token_ids) == expected_output(PROMPT, 1)
        # Again, it is there already; and the source still has it.
        assert list((await target.stub.FetchRuns(fetch(target, source, PROMPT))).fetched) == [True]
        assert len(await source.runs()) == 1


async def test_what_cannot_be_fetched_is_reported_and_changes_nothing() -> None:
    async with running_shard() as source, running_shard(cache_ram=0) as small, running_shard() as target:
        await save(source, PROMPT)
        await target.take()
        await small.take()
        assert list((await target.stub.FetchRuns(fetch(target, source, OTHER, PROMPT))).fetched) == [False, False]
        assert list((await target.stub.FetchRuns(fetch(target, source, PROMPT, OTHER))).fetched) == [True, False]
        assert list((await small.stub.FetchRuns(fetch(small, source, PROMPT))).fetched) == [False]
        stale = fetch(target, source, OTHER, source_epoch=source.epoch + 1)
        assert list((await target.stub.FetchRuns(stale)).fetched) == [False]
        assert len(await target.runs()) == 1
        assert await small.runs() == []
        await source.server.stop()
        assert list((await target.stub.FetchRuns(fetch(target, source, OTHER))).fetched) == [False]


async def test_epochs_and_keys_are_checked() -> None:
    async with running_shard() as source, running_shard() as target:
        await save(source, PROMPT)
        await target.take()
        stale = fetch(target, source, PROMPT, epoch=2)
        assert await refused(target.stub.FetchRuns(stale)) is ShardError.STALE_EPOCH
        short = fetch(target, source)
        short.keys.append(b"short")
        assert await refused(target.stub.FetchRuns(short)) is ShardError.BAD_REQUEST
        nowhere = shard_pb2.FetchRunsRequest(epoch=1, keys=[run_key(PROMPT)])
        assert await refused(target.stub.FetchRuns(nowhere)) is ShardError.BAD_REQUEST
        unknown = shard_pb2.ReadRunRequest(epoch=source.epoch, key=run_key(OTHER))
        assert await refused(source.stub.ReadRun(unknown).read()) is ShardError.UNKNOWN_RUN
        unleased = shard_pb2.ReadRunRequest(epoch=9, key=run_key(PROMPT))
        assert await refused(source.stub.ReadRun(unleased).read()) is ShardError.STALE_EPOCH
        assert await refused(source.stub.Drain(shard_pb2.DrainRequest(epoch=9))) is ShardError.STALE_EPOCH


async def test_a_source_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_shard.service.run_exchange._SILENCE_S", 0.3)
    released = threading.Event()
    monkeypatch.setattr(RunStore, "peek", lambda *_: released.wait(300) and None)
    async with running_shard() as source, running_shard() as target:
        await save(source, PROMPT)
        await target.take()
        async with in_time("the source is given up"):
            assert list((await target.stub.FetchRuns(fetch(target, source, PROMPT))).fetched) == [False]
        released.set()


async def test_a_lease_is_given_back_by_its_holder_only() -> None:
    async with running_shard(ToyBackend()) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, OTHER, ignore_eos=True))
        other = shard_pb2.LeaseRequest(router_id="other", epoch=1, release=True)
        assert await refused(shard.stub.Lease(other)) is ShardError.STALE_EPOCH
        stale = shard_pb2.LeaseRequest(router_id="test", epoch=2, release=True)
        assert await refused(shard.stub.Lease(stale)) is ShardError.STALE_EPOCH
        await shard.give_back()
        assert not (await shard.stub.Info(shard_pb2.InfoRequest())).leased
        assert await refused(shard.keep()) is ShardError.NOT_LEASED
        await shard.take(2)
        assert list((await shard.keep()).sequence_ids) == []


async def test_a_router_can_ask_a_shard_to_drain() -> None:
    async with running_shard(drain_timeout_s=300.0) as shard:
        await shard.take()
        assert not shard.server.drain_asked.is_set()
        await shard.stub.Drain(shard_pb2.DrainRequest(epoch=1))
        assert shard.server.drain_asked.is_set()
        draining = asyncio.create_task(shard.server.drain())
        watch = shard.stub.Watch(shard_pb2.WatchRequest(interval_ms=100))
        assert (await watch.read()).draining
        with pytest.raises(grpc.aio.AioRpcError):
            await shard.stub.Lease(shard_pb2.LeaseRequest(router_id="new", epoch=2, ttl_ms=1_000))
        assert not draining.done()
        await shard.give_back()
        async with in_time("the shard has drained"):
            await draining
