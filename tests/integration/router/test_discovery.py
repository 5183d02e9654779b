"""Shards that join and leave while the router runs."""

import asyncio
import re
import time

import pytest
from aiohttp import ClientSession

from caravan_router.engine.client import ShardClient
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardState
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, body, cluster, expected_text, generate
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import eventually


async def set_list(running: Cluster, *addresses: str) -> None:
    await asyncio.to_thread(running.list_shards, addresses)


async def test_a_shard_joins_when_its_address_is_listed() -> None:
    async with cluster(ClusterConfig(shards=1, step_s=0.005, listed=True)) as running:
        (first,) = running.addresses
        second = running.add_address()
        await set_list(running, first, second)
        await eventually(lambda: running.state(second) is ShardState.JOINING, "its address is known")
        assert await run(running.engine, spec([1, 2, 3], 20)) == undisturbed(spec([1, 2, 3], 20))
        await running.start_shard(second)
        await running.wait_until_up(2)
        await eventually(lambda: running.state(second) is ShardState.SERVING)
        wanted = [spec([number, 2, 3], 100) for number in range(8)]
        streams = [running.engine.submit(one) for one in wanted]
        await eventually(
            lambda: all(shard.stays.residents for shard in running.engine.scheduler.shards.values()), "both run"
        )
        assert await asyncio.gather(*map(read, streams)) == [undisturbed(one) for one in wanted]
        await running.wait_until_at_rest()


async def test_a_shard_whose_address_is_gone_ends_what_it_runs_and_gets_nothing_new() -> None:
    log = StepLog()
    async with cluster(ClusterConfig(shards=2, listed=True, hook=log)) as running:
        shards = running.engine.scheduler.shards
        wanted = spec([1, 2, 3], 40)
        reading = asyncio.create_task(run(running.engine, wanted))
        async with log.held():
            (leaving,) = [name for name, shard in shards.items() if shard.stays.residents]
            (staying,) = set(running.addresses) - {leaving}
            ledger = shards[leaving]
            await set_list(running, staying)
            await eventually(lambda: ledger.drain.has_begun, "it drains")
            report = running.report(leaving)
            assert report is not None
            assert (report.standing.state, report.standing.reason) == (ShardState.DRAINING, "its address is gone")
            assert report.sequences == 1
        later = spec([4, 5, 6], 20)
        assert await run(running.engine, later) == undisturbed(later)
        assert await reading == undisturbed(wanted)
        await eventually(lambda: running.state(leaving) is None, "it is forgotten")
        assert list(shards) == [staying]
        assert running.engine.model.total_cells == running.config.cells
        assert f'shard="{leaving}"' not in (await running.metrics.render()).decode()
        await running.stop_shard(leaving)
        await running.wait_until_at_rest()


async def test_an_address_that_comes_back_gets_a_new_lease() -> None:
    log = StepLog()
    async with cluster(ClusterConfig(shards=1, listed=True, hook=log)) as running:
        (address,) = running.addresses
        wanted = spec([1, 2, 3], 40)
        reading = asyncio.create_task(run(running.engine, wanted))
        async with log.held():
            await set_list(running)
            await eventually(lambda: running.state(address) is ShardState.DRAINING, "it drains")
            await set_list(running, address)
            await eventually(lambda: address in running.fleet._pool._listed, "the router knows that it is back")
            report = running.report(address)
            assert report is not None
            assert (report.standing.state, report.epoch) == (ShardState.DRAINING, 1)
        assert await reading == undisturbed(wanted)
        await eventually(lambda: running.state(address) is ShardState.SERVING, "it serves again")
        report = running.report(address)
        assert report is not None
        assert report.epoch == 2
        assert await run(running.engine, wanted) == undisturbed(wanted)


async def test_a_shard_that_is_lost_while_it_drains_does_not_come_back() -> None:
    log = StepLog()
    async with cluster(ClusterConfig(shards=2, listed=True, hook=log)) as running:
        shards = running.engine.scheduler.shards
        wanted = spec([1, 2, 3], 40)
        reading = asyncio.create_task(run(running.engine, wanted))
        async with log.held():
            (leaving,) = [name for name, shard in shards.items() if shard.stays.residents]
            await set_list(running, *(set(running.addresses) - {leaving}))
            await eventually(lambda: running.state(leaving) is ShardState.DRAINING, "it drains")
            client = ShardClient(leaving, 5.0)
            await client.lease("another", 2, 0.1)
            await eventually(lambda: leaving not in shards, "it is lost")
        await client.close()
        assert await reading == undisturbed(wanted)
        await eventually(lambda: running.state(leaving) is None, "it is forgotten")
        assert leaving not in shards


async def test_a_shard_with_two_addresses_joins_once() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running:
        (first,) = running.addresses
        twin = first.replace("unix:", "unix://")
        await set_list(running, first, twin)
        await eventually(lambda: running.state(twin) is ShardState.REFUSED, "it is refused")
        report = running.report(twin)
        assert report is not None
        assert report.standing.reason == f"it is the shard at {first}"
        assert list(running.engine.scheduler.shards) == [first]


async def test_a_lost_shard_is_shown_until_it_comes_back() -> None:
    async with cluster(ClusterConfig(shards=1)) as running:
        (address,) = running.addresses
        await running.stop_shard(address)
        await eventually(lambda: running.state(address) is ShardState.LOST, "it is lost")
        report = running.report(address)
        assert report is not None
        assert (report.epoch, report.sequences, report.used_cells) == (1, 0, 0)
        assert report.standing.reason
        await eventually(lambda: (shown := running.report(address)) is not None and bool(shown.standing.next_try_s))
        await running.start_shard(address)
        await eventually(lambda: running.state(address) is ShardState.SERVING, "it serves again")


async def test_requests_wait_for_the_first_shard() -> None:
    async with cluster(ClusterConfig(shards=0, listed=True)) as running, ClientSession() as session:
        assert running.fleet.shards() == []
        answer = asyncio.create_task(generate(session, running.url, body("hello", 20)))
        await until_waiting(running, 1)
        assert not answer.done()
        address = running.add_address()
        await running.start_shard(address)
        await set_list(running, address)
        assert (await answer)["generated_text"] == expected_text("hello", 20)
        await running.wait_until_at_rest()


@pytest.mark.parametrize("listed", ["no file", "an empty list", "nobody listens"])
async def test_without_a_shard_from_the_start_requests_end_with_a_reason(listed: str) -> None:
    config = ClusterConfig(shards=0, listed=True, scheduler=SchedulerConfig(no_shard_grace_s=0.5))
    async with cluster(config) as running, ClientSession() as session:
        if listed == "no file":
            await asyncio.to_thread(running.delete_list)
        elif listed == "nobody listens":
            await set_list(running, running.add_address())
        began = time.monotonic()
        async with session.post(f"{running.url}/generate", json=body("hello", 5)) as response:
            assert (response.status, (await response.json())["error_type"]) == (503, "no_shard")
        assert time.monotonic() - began > 0.5


async def test_when_all_shards_leave_requests_wait_for_others() -> None:
    async with cluster(ClusterConfig(shards=2, listed=True)) as running, ClientSession() as session:
        old = list(running.addresses)
        await set_list(running)
        await running.wait_until_up(0)
        await eventually(lambda: not running.fleet.shards(), "none is known")
        async with session.get(f"{running.url}/health") as health:
            assert health.status == 503
        answer = asyncio.create_task(generate(session, running.url, body("hello", 20)))
        await until_waiting(running, 1)
        assert not answer.done()
        for address in old:
            await running.stop_shard(address)
        new = running.add_address()
        await running.start_shard(new)
        await set_list(running, new)
        assert (await answer)["generated_text"] == expected_text("hello", 20)
        await running.wait_until_at_rest()


async def test_a_shard_that_was_lost_before_can_leave() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running:
        (address,) = running.addresses
        for _ in range(2):
            await running.stop_shard(address)
            await eventually(lambda: running.state(address) is ShardState.LOST, "it is lost")
            await running.start_shard(address)
            await eventually(lambda: running.state(address) is ShardState.SERVING, "it serves again")
        await set_list(running)
        await eventually(lambda: running.state(address) is None, "it is forgotten")


async def until_left(running: Cluster, address: str) -> None:
    await eventually(lambda: running.state(address) is None, "it is forgotten")


async def test_metrics_do_not_grow_with_shards_that_come_and_go() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True)) as running, ClientSession() as session:
        for number in range(6):
            old, new = running.addresses[-1], running.add_address()
            await running.start_shard(new)
            await generate(session, running.url, body(f"prompt {number}", 5))
            if number % 2:
                await running.stop_shard(old)
                await set_list(running, new)
            else:
                await set_list(running, new)
                await until_left(running, old)
                await running.stop_shard(old)
            await until_left(running, old)
            await running.wait_until_up(1)
            await generate(session, running.url, body(f"other {number}", 5))
            page = (await running.metrics.render()).decode()
            assert set(re.findall(r'shard="([^"]*)"', page)) <= {new}
            assert not any(address in page for address in running.addresses if address != new)
        # Three were lost while they were up; three others drained.
        assert await running.metric("caravan_shard_losses_total") == 3


async def until_waiting(running: Cluster, requests: int) -> None:
    await eventually(running.queue_size, f"{requests} requests wait", lambda size: size == requests)


async def test_requests_count_as_waiting_before_the_first_shard_and_after_the_last() -> None:
    async with cluster(ClusterConfig(shards=0, listed=True, expected=("toy",))) as running, ClientSession() as session:
        for _ in range(2):
            answer = asyncio.create_task(generate(session, running.url, body("hello", 20)))
            await until_waiting(running, 1)
            address = running.add_address()
            await running.start_shard(address)
            await set_list(running, address)
            await answer
            await until_waiting(running, 0)
            await set_list(running)
            await running.wait_until_up(0)
