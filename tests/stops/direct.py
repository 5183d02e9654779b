"""Stops a shard process of its own, by SIGTERM or as a router does."""

import asyncio
import random
import signal
import sys
import time
from pathlib import Path

import grpc.aio

from caravan_proto.channel import client_options
from caravan_proto.shard.v1 import shard_pb2, shard_pb2_grpc
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_testing.shard_harness import RunningShard
from stops.callers import Callers
from stops.models import StoppedModel
from stops.outcome import Stopped, faults_in
from stops.tally import Tally

# Running sequences have so long to end. The callers never give their lease back, so that calls run until the end.
DRAIN_S = 0.3
_START_S = 120.0
# A process that has not ended by then hangs, however busy the host is.
HANGS_S = 150.0
# So many stops do not wait until calls of all kinds have been answered.
_EARLY_SHARE = 0.1
_LONGEST_PAUSE_S = 0.6


async def stop_directly(way: str, model: StoppedModel, folder: Path, seed: int) -> Stopped:
    """Start a shard of ``model``, call it, and stop it by ``sigterm`` or ``drain`` in the midst of calls."""
    stopped, chance, tally = Stopped(way, model.name), random.Random(seed), Tally()
    address, log = f"unix:{folder / f'{seed}.sock'}", folder / f"{seed}.log"
    command = (sys.executable, "-m", "caravan_shard", "--address", address, "--model", str(model.file), *model.flags)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, "--drain-timeout-s", str(DRAIN_S), stdout=output, stderr=output
        )
    try:
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            async with asyncio.timeout(_START_S):
                await channel.channel_ready()
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            server = ShardServer(ShardConfig(backend="fake", address=address))
            shard = RunningShard(server, ToyBackend(), address, channel, stub)
            await shard.take()
            callers = Callers(shard, model, seed, leased=True)
            calling = asyncio.create_task(callers.run(tally))
            async with asyncio.timeout(_START_S):
                await tally.until_answered(callers.kinds if chance.random() > _EARLY_SHARE else set())
            await asyncio.sleep(chance.uniform(0, _LONGEST_PAUSE_S))
            tally.has_begun_to_end, began = True, time.monotonic()
            if way == "sigterm":
                process.send_signal(signal.SIGTERM)
            else:
                await shard.stub.Drain(shard_pb2.DrainRequest(epoch=shard.epoch))
            async with asyncio.timeout(HANGS_S):
                code = await process.wait()
                stopped.seconds = time.monotonic() - began
                await calling
    except TimeoutError:
        stopped.problems.append("it hangs")
        code = None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    stopped.exit_name = _exit_name(code)
    stopped.ends = tally.ends
    stopped.problems += [*tally.problems, *faults_in(await asyncio.to_thread(log.read_text))]
    if code != 0:
        stopped.problems.append(f"exit status {stopped.exit_name}")
    return stopped


def _exit_name(code: int | None) -> str:
    if code is None:
        return "none"
    return signal.Signals(-code).name if code < 0 else str(code)
