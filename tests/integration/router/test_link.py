"""The link between a router and a shard: draining, and which router holds the shard."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from caravan_router.engine.client import ShardClient
from caravan_router.engine.link import LinkOwner, ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.observer import EngineObserver
from caravan_router.engine.shard_calls import ShardRpcError
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.events import Event, ShardDraining, ShardJoined, ShardLost
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_shard.service.text import TextService
from caravan_testing.cluster import ClusterConfig, cluster
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.step_log import StepLog
from caravan_testing.waiting import eventually

# The router must not learn from a heartbeat what these tests wait for.
NO_HEARTBEAT = LinkConfig(router_id="test", heartbeat_s=600, silence_s=1800, lease_ttl_s=18000)


async def test_the_router_hears_at_once_that_a_shard_drains() -> None:
    log = StepLog()
    async with cluster(ClusterConfig(shards=2, link=NO_HEARTBEAT, hook=log)) as running:
        shards = running.engine.scheduler.shards
        reading = asyncio.create_task(run(running.engine, spec([1, 2, 3], 20)))
        async with log.held():
            (leaving,) = [name for name, shard in shards.items() if shard.stays.residents]
            drained = asyncio.create_task(running.servers[leaving].drain())
            await eventually(lambda: shards[leaving].drain.has_begun, "the router knows")
        assert await reading == undisturbed(spec([1, 2, 3], 20))
        await drained


@dataclass(frozen=True, slots=True)
class Sink:
    """Takes the events of a shard in place of an engine."""

    observer: EngineObserver
    post: Callable[[Event], None]


async def test_the_router_hears_of_a_drain_before_the_shard_is_gone(tmp_path: Path) -> None:
    """This holds even if the shard ends at once."""
    config = ShardConfig(backend="fake", address=f"unix:{tmp_path}/shard", drain_timeout_s=0.0)
    server = ShardServer(config, ToyBackend)
    await server.start()
    events: list[Event] = []
    sink = Sink(observer=Metrics().of("toy"), post=events.append)
    link = ShardLink(server.address, NO_HEARTBEAT, LinkOwner(accept=lambda _link, _info: sink))
    running = asyncio.create_task(link.run())
    # A shard that ends between joining and the router's first watch is merely lost.
    await eventually(lambda: link._reported is not None, "the router watches it")
    await server.drain()
    await server.stop()
    await eventually(lambda: len(events) >= 3, "the router knows")
    assert [type(event) for event in events] == [ShardJoined, ShardDraining, ShardLost]
    running.cancel()
    await asyncio.wait({running})


async def test_what_was_sent_before_the_router_knew_of_a_drain_is_carried_out() -> None:
    log = StepLog()
    wanted = [spec([number, 2, 3], 100) for number in range(2)]
    async with cluster(ClusterConfig(hook=log, step_s=0.005, drain_timeout_s=60.0)) as running:
        (address,) = running.addresses
        (shard,) = running.engine.scheduler.shards.values()
        reading = [asyncio.create_task(run(running.engine, wanted[0]))]
        await eventually(lambda: bool(shard.stays.decoding), "the first decodes")
        async with log.held():
            reading.append(asyncio.create_task(run(running.engine, wanted[1])))
            await eventually(lambda: running.queued_commands(address) > 0, "the shard has the prompt of the second")
            drained = asyncio.create_task(running.servers[address].drain())
            await eventually(lambda: shard.drain.has_begun, "the router knows")
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        assert running.engine.scheduler.shards[address] is shard, "the shard was lost"
        await drained


async def test_a_call_of_a_client_that_is_closed_fails_and_cancels_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, never = asyncio.Event(), asyncio.Event()

    async def tokenize(*_args: object, **_kwargs: object) -> None:
        asked.set()
        await never.wait()

    monkeypatch.setattr(TextService, "tokenize", tokenize)
    async with cluster() as running:
        client = ShardClient(running.addresses[0], 5.0)
        call = asyncio.create_task(client.tokenize("text", add_special=True))
        await asked.wait()
        await client.close()
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await call
        with pytest.raises(ShardRpcError, match="the connection was closed"):
            await client.tokenize("text", add_special=True)
