"""How soon the router notices a shard that is lost, and that a slow one is not."""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import ClientSession

from caravan_router.engine.discovery import Address
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link_config import LinkConfig
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardReport, ShardState
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_testing.cluster import VOCABULARY, Cluster, ClusterConfig, cluster
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

SILENCE_S = 1.5


@contextlib.asynccontextmanager
async def shard_process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "caravan_shard", "--backend", "fake", "--address", address)
    process = await asyncio.create_subprocess_exec(*command, "--fake-step-ms", "10")
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def fleet_of(*addresses: str) -> AsyncIterator[Fleet]:
    """Run the fleet as `caravan-router` configures it, and wait until all shards serve."""
    link = LinkConfig(router_id="test", silence_s=SILENCE_S, heartbeat_s=SILENCE_S / 3)
    fleet = Fleet([Address(address) for address in addresses], SchedulerConfig(), link, Metrics().of)
    running = asyncio.create_task(fleet.run())
    try:
        await fleet.wait_until_ready()
        shards = fleet.engines[0].scheduler.shards
        await eventually(lambda: len(shards) == len(addresses), "the shards joined")
        yield fleet
    finally:
        running.cancel()
        await asyncio.wait({running})


def report_of(fleet: Fleet, address: str) -> ShardReport:
    return next(report for report in fleet.shards() if report.address == address)


async def test_a_stopped_process_is_noticed_and_its_late_replies_count_for_nothing(tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path}/{number}" for number in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        processes = {address: await stack.enter_async_context(shard_process(address)) for address in addresses}
        fleet = await stack.enter_async_context(fleet_of(*addresses))
        engine = fleet.engines[0]
        wanted = [spec([number, 2, 3], 300) for number in range(4)]
        reading = [asyncio.create_task(run(engine, one)) for one in wanted]
        shards = engine.scheduler.shards
        await eventually(
            lambda: len(shards) == 2 and all(shard.stays.decoding for shard in shards.values()), "both decode"
        )
        stopped = addresses[0]
        before = report_of(fleet, stopped).epoch
        processes[stopped].send_signal(signal.SIGSTOP)
        await eventually(lambda: report_of(fleet, stopped).standing.state is ShardState.LOST, "it is lost")
        reason = report_of(fleet, stopped).standing.reason
        # Whichever of these comes first on a busy host.
        told = (f"reported nothing for {SILENCE_S} s", "no step completed for", "ping timeout")
        assert any(words in reason for words in told), reason
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        processes[stopped].send_signal(signal.SIGCONT)
        await eventually(lambda: report_of(fleet, stopped).standing.state is ShardState.SERVING, "it serves again")
        assert report_of(fleet, stopped).epoch > before
        assert await asyncio.gather(*(run(engine, one) for one in wanted)) == [undisturbed(one) for one in wanted]


async def test_a_shard_that_is_started_again_under_its_address_is_another_incarnation(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/shard"
    async with shard_process(address) as process, fleet_of(address) as fleet:
        engine = fleet.engines[0]
        wanted = spec([1, 2, 3], 300)
        reading = asyncio.create_task(run(engine, wanted))
        await eventually(lambda: bool(engine.scheduler.shards[address].stays.decoding), "it decodes")
        process.kill()
        await process.wait()
        await eventually(lambda: report_of(fleet, address).standing.state is ShardState.LOST, "it is lost")
        # The connection ends with the process: nobody waits for a report or a step.
        reason = report_of(fleet, address).standing.reason
        assert reason
        assert "reported nothing" not in reason
        assert "no step completed" not in reason
        async with shard_process(address):
            assert await reading == undisturbed(wanted)
            report = report_of(fleet, address)
            assert (report.standing.state, report.epoch) == (ShardState.SERVING, 1)


class HungThread:
    """A backend's hook that blocks the thread of one shard when it is told to."""

    def __init__(self) -> None:
        self.hang = threading.Event()
        self.release = threading.Event()
        self._thread: int | None = None

    def __call__(self, _batch: TokenBatch) -> DecodeOutcome | None:
        if self.hang.is_set() and self._thread in (None, threading.get_ident()):
            self._thread = threading.get_ident()
            self.release.wait(DEADLINE_S)
        return None


def watched(step_s: float, token_s: float, hook: HungThread | None, shards: int) -> ClusterConfig:
    # A process that other ones keep from running for less is not taken for lost.
    link = LinkConfig(router_id="test", heartbeat_s=0.2, silence_s=2.0)
    return ClusterConfig(shards=shards, step_s=step_s, token_s=token_s, hook=hook, link=link)


async def steady(running: Cluster) -> None:
    """Let the links see enough steps to know how long one takes."""
    wanted = [spec([number, 2, 3], 60) for number in range(2 * running.config.shards)]
    assert await asyncio.gather(*(run(running.engine, one) for one in wanted)) == [undisturbed(one) for one in wanted]


async def test_a_step_that_hangs_is_noticed_though_the_process_answers() -> None:
    hung = HungThread()
    async with cluster(watched(step_s=0.005, token_s=0.0, hook=hung, shards=2)) as running:
        await steady(running)
        wanted = [spec([number, 2, 3], 300) for number in range(4)]
        reading = [asyncio.create_task(run(running.engine, one)) for one in wanted]
        shards = running.engine.scheduler.shards
        await eventually(lambda: any(shard.stays.decoding for shard in shards.values()), "some decode")
        hung.hang.set()
        try:
            await eventually(lambda: ShardState.LOST in map(running.state, running.addresses), "it is lost")
            (lost,) = [address for address in running.addresses if running.state(address) is ShardState.LOST]
            report = running.report(lost)
            assert report is not None
            assert "no step completed for" in report.standing.reason
            # What it ran goes on elsewhere, and it stays out while its step hangs.
            assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
            assert running.state(lost) is ShardState.LOST
        finally:
            hung.hang.clear()
            hung.release.set()
        await eventually(lambda: running.state(lost) is ShardState.SERVING, "it serves again")
        await steady(running)


async def test_a_long_step_of_a_large_prompt_is_no_loss() -> None:
    """A step of 250 tokens takes 4 s here, and silence 2 s."""
    async with cluster(watched(step_s=0.0, token_s=0.016, hook=None, shards=1)) as running:
        await steady(running)
        wanted = spec(range(1, 250), 5)
        began = time.monotonic()
        assert await run(running.engine, wanted) == undisturbed(wanted)
        assert time.monotonic() - began > 2.0
        report = running.report(running.addresses[0])
        assert report is not None
        assert (report.standing.state, report.epoch) == (ShardState.SERVING, 1)


@pytest.mark.parametrize("tokens", [1, 200])
async def test_the_first_steps_of_a_shard_may_be_long(tokens: int) -> None:
    async with cluster(watched(step_s=3.0, token_s=0.0, hook=None, shards=1)) as running:
        wanted = spec(range(1, tokens + 1), 2)
        assert await run(running.engine, wanted) == undisturbed(wanted)
        report = running.report(running.addresses[0])
        assert report is not None
        assert report.epoch == 1


class Poison:
    """A backend's hook that hangs in every step with the token `TOKEN`."""

    TOKEN = 77

    def __init__(self) -> None:
        self.release = threading.Event()

    def __call__(self, batch: TokenBatch) -> DecodeOutcome | None:
        if self.TOKEN in batch.tokens:
            self.release.wait(DEADLINE_S)
        return None


async def test_a_request_that_hangs_two_shards_in_a_row_is_ended_and_hangs_no_third() -> None:
    poison = Poison()
    link = LinkConfig(router_id="test", heartbeat_s=0.1, silence_s=20.0, step_timeout_s=0.5)
    async with cluster(ClusterConfig(shards=3, hook=poison, link=link)) as running, ClientSession() as session:
        try:
            bad = {"inputs": VOCABULARY.piece(Poison.TOKEN).data.decode(), "parameters": {"max_new_tokens": 5}}
            async with session.post(f"{running.url}/generate", json=bad) as response:
                error = "Request failed during generation: its shard was lost several times before the next token"
                assert response.status == 424
                assert await response.json() == {"error": error, "error_type": "generation"}
            states = [running.state(address) for address in running.addresses]
            assert sorted(state.value for state in states if state is not None) == ["lost", "lost", "serving"]
            wanted = spec([1, 2, 3], 30)
            assert await run(running.engine, wanted) == undisturbed(wanted)
        finally:
            poison.release.set()
        await running.wait_until_up(3)
