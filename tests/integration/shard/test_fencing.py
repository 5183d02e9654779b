"""Only the router with the newest epoch commands, and only while its lease lasts."""

import pytest

from caravan_proto.errors import ShardError
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_testing.shard_harness import RunningShard, prompt_chunk, refused, running_shard
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
