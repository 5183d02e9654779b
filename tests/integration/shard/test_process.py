"""The shard program: start, drain and end."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from caravan_proto.channel import client_options
from caravan_proto.errors import ShardError
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_testing.shard_harness import RunningShard, error_code, prompt_chunk

pytestmark = pytest.mark.asyncio(loop_scope="session")

COMMAND = (sys.executable, "-m", "caravan_shard")


@asynccontextmanager
async def shard_process(folder: Path, *flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, RunningShard]]:
    address = f"unix:{folder / 'shard'}"
    process = await asyncio.create_subprocess_exec(*COMMAND, "--backend", "fake", "--address", address, *flags)
    try:
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            async with asyncio.timeout(60):
                await channel.channel_ready()
            server = ShardServer(ShardConfig(backend="fake", address=address))
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            yield process, RunningShard(server, ToyBackend(), address, channel, stub)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_drains_what_runs_and_refuses_what_is_new(tmp_path: Path) -> None:
    async with shard_process(tmp_path, "--fake-step-ms", "1") as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=400))
        replies = aiter(shard.decode([0]))
        await anext(replies)
        process.send_signal(signal.SIGTERM)
        refusal = None
        async with asyncio.timeout(60):
            while True:
                try:
                    await shard.prefill(prompt_chunk(1, b"new", ignore_eos=True), release=[])
                except grpc.aio.AioRpcError as error:
                    refusal = error_code(error)
                    break
                await shard.keep(0)
            assert refusal is ShardError.DRAINING
            # The Decode ended early for the commands above. The sequence itself continues to its end.
            steps = len([reply async for reply in replies]) + len([reply async for reply in shard.decode([0])])
            assert steps > 300
            # The drain does not wait for the release of an ended sequence.
            assert await process.wait() == 0
    assert not (tmp_path / "shard").exists()


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with shard_process(tmp_path) as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            while True:
                try:
                    await shard.prefill(prompt_chunk(1, b"x"))
                    await shard.keep(0)
                except grpc.aio.AioRpcError:
                    break
            assert process.returncode is None
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 0


async def test_a_drain_waits_for_what_is_swapped(tmp_path: Path) -> None:
    async with shard_process(tmp_path) as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc", ignore_eos=True, max_new=5))
        await shard.swap_out(shard_pb2.SwapOutEntry(sequence_id=0, handle=1))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while not (await shard.take()).draining:  # noqa: ASYNC110  the shard tells nobody
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert list((await shard.swap_in(shard_pb2.SwapInEntry(handle=1, sequence_id=0))).restored) == [True]
            assert len([reply async for reply in shard.decode([0])]) == 4
            assert await process.wait() == 0


async def test_a_drain_ends_at_its_timeout(tmp_path: Path) -> None:
    async with shard_process(tmp_path, "--drain-timeout-s", "0.2") as (process, shard):
        await shard.take()
        await shard.prefill(prompt_chunk(0, b"abc"))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
