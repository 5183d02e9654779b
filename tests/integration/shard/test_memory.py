"""Saved runs over gRPC, on the toy backend: parked, loaded, exchanged between shards, and fenced by leases."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.limits import KvLayout
from caravan_proto.shard.v1 import shard_pb2, types_pb2
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.server import ShardServer
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import load_entry, run_key
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import eventually, in_time

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = b"a prompt to begin with"
TAIL = b" and its tail"


def prefix(source: int, length: int) -> types_pb2.PrefixCopy:
    return types_pb2.PrefixCopy(source_sequence_id=source, length=length)


def save_of(sequence_id: int, tokens: bytes, start: int = 0, *, release: bool = False) -> shard_pb2.SaveEntry:
    return shard_pb2.SaveEntry(
        sequence_id=sequence_id, start=start, cuts=[len(tokens)], keys=[run_key(tokens)], release=release
    )


def load_of(sequence_id: int, tokens: bytes, *parts: tuple[bytes, int]) -> shard_pb2.LoadEntry:
    entry = load_entry(sequence_id, tokens, *parts)
    return shard_pb2.LoadEntry(
        sequence_id=sequence_id,
        token_ids=tokens,
        slices=[shard_pb2.RunSlice(key=piece.key, start=piece.start, end=piece.end) for piece in entry.slices],
    )


async def said(shard: RunningShard, *sequence_ids: int, **decode: Any) -> dict[int, list[int]]:
    output: dict[int, list[int]] = {key: [] for key in sequence_ids}
    async for reply in shard.steps(sequence_ids, **decode):
        for key, token in zip(reply.tokens.sequence_ids, reply.tokens.token_ids, strict=True):
            output[key].append(token)
    return output


async def test_parked_copied_and_taken_over() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        await said(shard, 0, max_steps=3)
        first = await shard.prefill(prompt_chunk(4, TAIL, copy=prefix(0, 8)), park={0: 10})
        output = await said(shard, 0, 4)
        assert output == {0: [], 4: expected_output(PROMPT[:8] + TAIL, 50)[1:]}
        first = await shard.prefill(prompt_chunk(0, TAIL, copy=prefix(0, 9)), release=[4])
        output = await said(shard, 0)
        assert [*first.tokens.token_ids, *output[0]] == expected_output(PROMPT[:9] + TAIL, 50)
        assert (await shard.keep(0, park={0: 1})).free_cells == 8192 - 1


async def test_saved_loaded_and_continued() -> None:
    whole = PROMPT + TAIL
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT))
        await shard.prefill(prompt_chunk(1, TAIL, copy=prefix(0, len(PROMPT)), ignore_eos=True))
        left = await shard.save(save_of(0, PROMPT), save_of(1, whole, len(PROMPT), release=True), park={0: len(PROMPT)})
        assert list(left.saved) == [True, True]
        assert list(left.bytes) == [8 * len(PROMPT), 8 * len(TAIL)]
        assert left.total_ns > 0
        assert list((await shard.keep(0)).sequence_ids) == [0]
        assert sorted(await shard.runs()) == sorted(
            [(run_key(PROMPT), 0, len(PROMPT), False), (run_key(whole), len(PROMPT), len(whole), False)]
        )
        came = await shard.load(
            load_of(3, whole[:-1], (PROMPT, 10), (PROMPT, len(PROMPT)), (whole, len(whole) - 1)), load_of(4, b"never")
        )
        assert list(came.loaded) == [True, False]
        assert list(came.bad_runs) == [run_key(b"never")]
        first = await shard.prefill(
            prompt_chunk(3, whole[-1:], copy=prefix(3, len(whole) - 1), ignore_eos=True), drop=[run_key(whole)]
        )
        output = await said(shard, 3)
        assert [*first.tokens.token_ids, *output[3]] == expected_output(whole, 50, ignore_eos=True)
        assert [key for key, *_ in await shard.runs()] == [run_key(PROMPT)]


async def test_runs_outlive_a_lease() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        assert list((await shard.save(save_of(0, PROMPT))).saved) == [True]
        await shard.take(2)
        assert (await shard.keep()).sequence_ids == []
        assert list((await shard.load(load_of(0, PROMPT))).loaded) == [True]


async def test_many_runs_are_listed_in_several_messages() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        cuts = range(1, len(PROMPT) + 1)
        keys = [number.to_bytes(16, "little") for number in range(2_001)]
        entries = [
            shard_pb2.SaveEntry(
                sequence_id=0, start=0, cuts=cuts, keys=[*[bytes(16)] * (len(cuts) - 1), key], note=bytes(84)
            )
            for key in keys
        ]
        assert all((await shard.save(*entries)).saved)
        assert {key for key, *_ in await shard.runs()} == set(keys)
        parts = [len(part.starts) async for part in shard.stub.ListRuns(shard_pb2.ListRunsRequest())]
        # A message has half a MiB: 20 bytes for each of the 22 cuts of a run, and 84 of its note.
        assert parts == [1001, 1000]


async def test_the_layout_changes_under_running_sequences() -> None:
    backend = ToyBackend(cells=8192, layout=KvLayout.SPLIT, other_layouts=[KvLayout.UNIFIED])
    async with running_shard(backend) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True), prompt_chunk(1, TAIL, ignore_eos=True))
        output = await said(shard, 0, 1, max_steps=5)
        long = prompt_chunk(2, b"x" * 1_500)
        assert await refused(shard.prefill(long)) is ShardError.SEQUENCE_TOO_LONG
        changed = await shard.set_layout(shard_pb2.KV_LAYOUT_UNIFIED)
        assert changed.limits.kv_layout == shard_pb2.KV_LAYOUT_UNIFIED
        assert changed.limits.cells_per_sequence == 8192
        assert list(changed.lost_sequence_ids) == []
        layouts = (await shard.stub.Info(shard_pb2.InfoRequest())).limits.layouts
        assert [one.kv_layout for one in layouts] == [shard_pb2.KV_LAYOUT_UNIFIED, shard_pb2.KV_LAYOUT_SPLIT]
        assert layouts[0] == changed.limits
        await shard.prefill(long)
        assert await refused(shard.set_layout(shard_pb2.KV_LAYOUT_SPLIT)) is ShardError.SEQUENCE_TOO_LONG
        await shard.set_layout(shard_pb2.KV_LAYOUT_SPLIT, release=[2])
        rest = await said(shard, 0, 1)
        for key, prompt in ((0, PROMPT), (1, TAIL)):
            assert [*output[key], *rest[key]] == expected_output(prompt, 50, ignore_eos=True)[1:]


async def test_a_running_decode_gives_way_to_a_save() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True, max_new=5_000))
        decode = shard.decode([0], max_steps=4_000)
        await decode.initial_metadata()
        replies = aiter(decode)
        await anext(replies)
        assert list((await shard.save(save_of(0, PROMPT))).saved) == [True]
        assert len([reply async for reply in replies]) < 3_000


async def test_commands_about_runs_are_fenced_and_checked() -> None:
    async with running_shard() as shard:
        calls = (lambda: shard.save(save_of(0, PROMPT)), lambda: shard.load(load_of(0, PROMPT)))
        layout = lambda: shard.set_layout(shard_pb2.KV_LAYOUT_UNIFIED)  # noqa: E731
        for call in (*calls, layout):
            assert await refused(call()) is ShardError.NOT_LEASED
        await shard.take(2)
        await shard.prefill(prompt_chunk(0, PROMPT, ignore_eos=True))
        assert await refused(shard.save(save_of(1, PROMPT))) is ShardError.UNKNOWN_SEQUENCE
        assert await refused(shard.save(save_of(0, PROMPT + TAIL))) is ShardError.WRONG_POSITION
        assert await refused(shard.load(load_of(0, PROMPT))) is ShardError.SEQUENCE_EXISTS
        assert await refused(shard.prefill(park={0: 0})) is ShardError.WRONG_POSITION
        assert await refused(shard.set_layout(shard_pb2.KV_LAYOUT_SPLIT)) is ShardError.BAD_REQUEST
        assert await refused(shard.set_layout(shard_pb2.KV_LAYOUT_UNSPECIFIED)) is ShardError.BAD_REQUEST
        shard.epoch = 1
        for call in (*calls, layout):
            assert await refused(call()) is ShardError.STALE_EPOCH


@pytest.mark.parametrize(
    ("whole_only", "expected", "saving"),
    [
        (False, shard_pb2.PREFIX_SHARING_ANY, shard_pb2.RUN_SAVING_ANY),
        (True, shard_pb2.PREFIX_SHARING_WHOLE_ONLY, shard_pb2.RUN_SAVING_WITH_STATE),
    ],
)
async def test_info_has_what_can_be_shared_and_saved(
    whole_only: bool,
    expected: shard_pb2.PrefixSharing.ValueType,
    saving: shard_pb2.RunSaving.ValueType,
    tmp_path: Path,
) -> None:
    backend = ToyBackend(whole_only=whole_only, layout=KvLayout.SPLIT)
    async with running_shard(backend, cache_ram=64, cache_dir=str(tmp_path), cache_dir_space=2.0) as shard:
        limits = (await shard.stub.Info(shard_pb2.InfoRequest())).limits
        (layout,) = limits.layouts
        assert (layout.kv_layout, layout.cells, layout.cells_per_sequence) == (shard_pb2.KV_LAYOUT_SPLIT, 8192, 1024)
        assert (layout.prefix_sharing, layout.run_saving) == (expected, saving)
        # A fourth of the memory is for runs that are being written.
        assert (limits.saved_capacity.memory, limits.saved_capacity.disk) == (48 << 20, 2 << 30)


async def test_a_cache_folder_that_cannot_be_used_is_a_startup_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = ShardConfig(backend="fake", address=f"unix:{tmp_path / 'shard'}", cache_dir=str(tmp_path / "file"))
    with pytest.raises(StartupError, match=r"--cache-dir .*file: File exists"):
        await ShardServer(config).start()


RUN_PROMPT = b"a prompt to move " * 8
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
        await save(source, RUN_PROMPT)
        await target.take()
        # Another sequence decodes meanwhile.
        await target.prefill(prompt_chunk(7, OTHER, ignore_eos=True))
        decoding = target.decode([7])
        await decoding.initial_metadata()
        response = await target.stub.FetchRuns(fetch(target, source, RUN_PROMPT))
        assert list(response.fetched) == [True]
        assert response.total_ns > 0
        output = [token async for reply in decoding for step in reply.steps for token in step.tokens.token_ids]
        assert output == expected_output(OTHER, 50, ignore_eos=True)[1:]
        assert await target.runs() == [(run_key(RUN_PROMPT), 0, len(RUN_PROMPT), False)]
        piece = shard_pb2.RunSlice(key=run_key(RUN_PROMPT), start=0, end=len(RUN_PROMPT))
        await target.load(shard_pb2.LoadEntry(sequence_id=1, token_ids=RUN_PROMPT, slices=[piece]))
        copy = types_pb2.PrefixCopy(source_sequence_id=1, length=len(RUN_PROMPT) - 1)
        first = await target.prefill(prompt_chunk(1, RUN_PROMPT[-1:], copy=copy))
        assert list(first.tokens.token_ids) == expected_output(RUN_PROMPT, 1)
        # Again, it is there already; and the source still has it.
        assert list((await target.stub.FetchRuns(fetch(target, source, RUN_PROMPT))).fetched) == [True]
        assert len(await source.runs()) == 1


async def test_what_cannot_be_fetched_is_reported_and_changes_nothing() -> None:
    async with running_shard() as source, running_shard(cache_ram=0) as small, running_shard() as target:
        await save(source, RUN_PROMPT)
        await target.take()
        await small.take()
        assert list((await target.stub.FetchRuns(fetch(target, source, OTHER, RUN_PROMPT))).fetched) == [False, False]
        assert list((await target.stub.FetchRuns(fetch(target, source, RUN_PROMPT, OTHER))).fetched) == [True, False]
        assert list((await small.stub.FetchRuns(fetch(small, source, RUN_PROMPT))).fetched) == [False]
        stale = fetch(target, source, OTHER, source_epoch=source.epoch + 1)
        assert list((await target.stub.FetchRuns(stale)).fetched) == [False]
        assert len(await target.runs()) == 1
        assert await small.runs() == []
        await source.server.stop()
        assert list((await target.stub.FetchRuns(fetch(target, source, OTHER))).fetched) == [False]


async def test_epochs_and_keys_are_checked() -> None:
    async with running_shard() as source, running_shard() as target:
        await save(source, RUN_PROMPT)
        await target.take()
        stale = fetch(target, source, RUN_PROMPT, epoch=2)
        assert await refused(target.stub.FetchRuns(stale)) is ShardError.STALE_EPOCH
        short = fetch(target, source)
        short.keys.append(b"short")
        assert await refused(target.stub.FetchRuns(short)) is ShardError.BAD_REQUEST
        nowhere = shard_pb2.FetchRunsRequest(epoch=1, keys=[run_key(RUN_PROMPT)])
        assert await refused(target.stub.FetchRuns(nowhere)) is ShardError.BAD_REQUEST
        unknown = shard_pb2.ReadRunRequest(epoch=source.epoch, key=run_key(OTHER))
        assert await refused(source.stub.ReadRun(unknown).read()) is ShardError.UNKNOWN_RUN
        unleased = shard_pb2.ReadRunRequest(epoch=9, key=run_key(RUN_PROMPT))
        assert await refused(source.stub.ReadRun(unleased).read()) is ShardError.STALE_EPOCH
        assert await refused(source.stub.Drain(shard_pb2.DrainRequest(epoch=9))) is ShardError.STALE_EPOCH


async def test_a_source_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_shard.service.run_exchange._SILENCE_S", 0.3)
    released = threading.Event()
    monkeypatch.setattr(RunStore, "peek", lambda *_: released.wait(300) and None)
    async with running_shard() as source, running_shard() as target:
        await save(source, RUN_PROMPT)
        await target.take()
        async with in_time("the source is given up"):
            assert list((await target.stub.FetchRuns(fetch(target, source, RUN_PROMPT))).fetched) == [False]
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


async def until_empty(shard: RunningShard) -> None:
    await eventually(lambda: shard.backend.cache.used, "the shard is empty", lambda cells: cells == 0)


async def test_a_takeover_releases_everything_and_fences_the_old_router() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take(1, router_id="old")
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=5_000))
        replies = aiter(shard.decode([0], max_steps=4_000))
        await anext(replies)
        await shard.take(2, router_id="new")
        # The new router's first command finds the shard empty, because the release is before it in the queue.
        assert list((await shard.keep()).sequence_ids) == []
        assert len([reply async for reply in replies]) < 3_000
        shard.epoch = 1
        assert await refused(shard.keep()) is ShardError.STALE_EPOCH
        assert await refused(shard.prefill(prompt_chunk(0, b"abc"))) is ShardError.STALE_EPOCH
        assert await refused(shard.decode([0]).read()) is ShardError.STALE_EPOCH
        assert await refused(shard.take(1, router_id="old")) is ShardError.STALE_EPOCH
        assert await refused(shard.take(2, router_id="old")) is ShardError.STALE_EPOCH


async def test_an_epoch_from_the_future_is_refused() -> None:
    async with running_shard() as shard:
        await shard.take(3)
        shard.epoch = 4
        assert await refused(shard.keep()) is ShardError.STALE_EPOCH


async def test_renewing_keeps_the_sequences() -> None:
    async with running_shard() as shard:
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        assert (await shard.take()).sequences == 1
        assert list((await shard.keep(0)).sequence_ids) == [0]


async def test_an_expired_lease_releases_everything_by_itself() -> None:
    async with running_shard() as shard:
        await shard.take(1)
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=5_000))
        assert shard.backend.cache.used
        await shard.take(1, ttl_ms=100)
        await until_empty(shard)
        assert await refused(shard.keep()) is ShardError.NOT_LEASED
        assert await refused(shard.take(1)) is ShardError.STALE_EPOCH
        await shard.take(2)
        assert (await shard.keep()).free_cells == 8192


async def test_expiry_ends_a_running_decode() -> None:
    async with running_shard(ToyBackend(step_s=0.002)) as shard:
        await shard.take(1)
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=8_000))
        replies = aiter(shard.decode([0], max_steps=7_000))
        await anext(replies)
        await shard.take(1, ttl_ms=150)
        assert len([reply async for reply in replies]) < 6_000
        await until_empty(shard)
