"""Several routers with the same shards: they share them out, and replace each other."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.messages.adapters import AdapterSource
from caravan_router.engine.client import ShardClient
from caravan_router.engine.discovery import Address
from caravan_router.engine.fleet import Fleet
from caravan_router.engine.link import ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardState
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

CONFIG = ClusterConfig(
    shards=4,
    step_s=0.005,
    token_s=0.001,
    link=LinkConfig(router_id="first", heartbeat_s=0.2, silence_s=DEADLINE_S, address_refresh_s=0.02),
)


@contextlib.asynccontextmanager
async def other_router(running: Cluster, name: str = "second", url: str = "") -> AsyncIterator[Fleet]:
    """Run another router with the same shards."""
    sources = [Address(address) for address in running.addresses]
    # On a busy host nothing is lost by silence. Leases end long after each test.
    link = LinkConfig(router_id=name, url=url, heartbeat_s=0.2, silence_s=DEADLINE_S, lease_ttl_s=10 * DEADLINE_S)
    fleet = Fleet(sources, SchedulerConfig(), link, Metrics().of)
    serving = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        serving.cancel()
        await asyncio.wait({serving})


def held(fleet: Fleet) -> set[str]:
    """Return the addresses of the shards that a router holds."""
    return {report.address for report in fleet.shards() if report.standing.state is ShardState.SERVING}


class Asked:
    """Counts how often each router has considered to take each shard that another one holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._times: Counter[tuple[str, str]] = Counter()
        ask_for = ShardLink._ask_for

        async def counted(link: ShardLink, *arguments: Any) -> bool:
            taken = await ask_for(link, *arguments)
            self._times[link._config.router_id, link.address] += not taken
            return taken

        monkeypatch.setattr(ShardLink, "_ask_for", counted)

    async def again(self, router: str, addresses: set[str]) -> None:
        """Wait until a router has considered each of ``addresses`` three times more, and the others know it."""
        due = {(router, address): self._times[router, address] + 3 for address in addresses}
        what = f"the router {router} wants {sorted(addresses)} again and again"
        await eventually(lambda: all(self._times[key] >= times for key, times in due.items()), what)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.mark.usefixtures("copies_cost_as_guessed")
async def test_routers_share_out_their_shards_while_requests_run(asked: Asked) -> None:
    async with cluster(CONFIG) as running:
        wanted = [spec([number, *range(60, 160)], 400) for number in range(8)]
        reading = [asyncio.create_task(read(running.engine.submit(one))) for one in wanted]
        async with other_router(running) as second:
            await eventually(lambda: len(held(second)) == 2 and len(held(running.fleet)) == 2, "each has two")
            assert held(second) | held(running.fleet) == set(running.addresses)
            theirs = spec([7, 8, 9], 20)
            assert await run(second.engines[0], theirs) == undisturbed(theirs)
            assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
            assert await running.metric("caravan_tokens_recomputed_total") < 100
            before = held(second)
            await asked.again("second", held(running.fleet))
            await asked.again("first", before)
            assert held(second) == before, "shards go back and forth"
        await eventually(lambda: len(held(running.fleet)) == 4, "the first has all again")
        await running.wait_until_at_rest()


async def test_a_router_stands_by_while_another_holds_the_only_shard(asked: Asked) -> None:
    async with cluster(ClusterConfig(step_s=0.005, link=CONFIG.link)) as running:
        (address,) = running.addresses
        async with other_router(running) as second:
            await eventually(lambda: [one.standing.state for one in second.shards()] == [ShardState.STANDBY])
            assert (second.healthy, second.ready) == (False, False)
            wanted = spec([1, 2, 3], 300)
            assert await run(running.engine, wanted) == undisturbed(wanted)
            assert held(running.fleet) == {address}
            # A request waits. The first router keeps its last shard while it ends.
            waiting = asyncio.create_task(run(second.engines[0], wanted))
            running.fleet.let_go()
            await asked.again("second", {address})
            assert held(running.fleet) == {address}
            await running.end_router()
            assert await waiting == undisturbed(wanted)
            assert second.ready
            assert held(second) == {address}


async def test_routers_take_turns_with_the_only_shard() -> None:
    async with cluster(ClusterConfig(step_s=0.005, link=CONFIG.link)) as running, other_router(running) as second:
        await eventually(lambda: [one.standing.state for one in second.shards()] == [ShardState.STANDBY])
        wanted, theirs = spec([1, 2, 3], 100), spec([7, 8, 9], 100)
        # A router without requests lets its only shard go to one whose requests wait, and gets it back in the same way.
        for engine in (second.engines[0], running.engine, second.engines[0]):
            assert await run(engine, theirs) == undisturbed(theirs)
        # With requests of its own, each has its turn. Without, no request of the second would end before the first's.
        ended: list[str] = []

        async def ask(name: str, fleet: Fleet) -> None:
            for _ in range(12):
                assert await run(fleet.engines[0], wanted) == undisturbed(wanted)
                ended.append(name)

        await asyncio.gather(*(ask(name, fleet) for name, fleet in (("first", running.fleet), ("second", second))))
        assert sum(one != other for one, other in pairwise(ended)) >= 2


async def test_a_borrowed_shard_goes_back_for_good_once_what_had_begun_has_ended() -> None:
    """Requests wait at a router that lost its shard, and new ones come to both: each goes where `neighbour` says."""
    config = ClusterConfig(step_s=0.005, link=replace(CONFIG.link, url="http://first"))
    async with cluster(config) as running, other_router(running, url="http://second") as second:
        await eventually(lambda: [one.standing.state for one in second.shards()] == [ShardState.STANDBY])
        routers = {"http://first": running.fleet, "http://second": second}
        begun: Counter[str] = Counter()
        enough = asyncio.Event()

        async def ask(url: str) -> None:
            while not enough.is_set():
                there = routers[url].neighbour("") or url
                begun[there] += 1
                wanted = spec([1, 2, 3], 20)
                assert await run(routers[there].engines[0], wanted) == undisturbed(wanted)

        asking = [asyncio.create_task(ask(url)) for url in routers for _ in range(2)]
        await eventually(lambda: begun["http://first"] > 8, "the second hands its requests over")
        assert begun["http://second"] == 0
        # They last longer than a turn.
        had_begun = [spec([7, 8, number], 700) for number in range(2)]
        await asyncio.gather(*(run(second.engines[0], one) for one in had_begun))
        seen = begun["http://first"]
        await eventually(lambda: begun["http://first"] > seen + 20, "the first has the shard for good")
        assert held(running.fleet) == set(running.addresses)
        assert begun["http://second"] == 0, "a router began something new in its turn"
        enough.set()
        await asyncio.gather(*asking)


async def test_a_router_has_its_own_adapters_in_its_turn(tmp_path: Path) -> None:
    """What the other router cannot answer waits here, although both hand requests over."""
    (tmp_path / "a.gguf").write_bytes(b"weights")
    config = ClusterConfig(step_s=0.005, lora_dir=str(tmp_path), link=replace(CONFIG.link, url="http://first"))
    async with cluster(config) as running, other_router(running, url="http://second") as second:
        await eventually(lambda: [one.standing.state for one in second.shards()] == [ShardState.STANDBY])
        (engine,) = second.engines
        in_turn = asyncio.create_task(run(engine, spec([1, 2, 3], 300)))
        await eventually(lambda: held(second) == set(running.addresses), "the second has its turn")
        assert await second.adapters.load("toy", AdapterSource(name="a", path="a.gguf"), replaces=False) == ""
        await in_turn
        other = spec([1, 2, 3], 20)
        assert await run(running.engine, other) == undisturbed(other)
        assert held(running.fleet) == set(running.addresses)
        assert running.engine.model.adapters == ()
        wanted = spec([7, 8, 9], 20, adapter=engine.model.loaded_adapters["a"])
        assert await run(engine, wanted) == undisturbed(wanted)


async def test_a_query_without_a_shard_counts_as_a_request() -> None:
    async with cluster(ClusterConfig(step_s=0.005, link=CONFIG.link)) as running, other_router(running) as second:
        await eventually(lambda: [one.standing.state for one in second.shards()] == [ShardState.STANDBY])
        assert (await second.engines[0].queries.tokenize("ab")).token_ids
        assert held(running.fleet) == set()


async def test_a_router_that_ends_lets_its_shards_go_but_for_one(asked: Asked) -> None:
    async with cluster(CONFIG) as running:
        wanted = [spec([number, *range(60, 160)], 600) for number in range(6)]
        reading = [asyncio.create_task(read(running.engine.submit(one))) for one in wanted]
        running.fleet.let_go()
        async with other_router(running) as second:
            await eventually(lambda: len(held(second)) == 3, "the second has all but one")
            assert len(held(running.fleet)) == 1
            assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
            await asked.again("second", held(running.fleet))
            assert len(held(second)) == 3
            await running.end_router()
            await eventually(lambda: len(held(second)) == 4, "the second has all")


async def test_a_router_that_ends_and_loses_its_last_shard_gets_the_only_one_of_another() -> None:
    config = ClusterConfig(shards=2, step_s=0.005, drain_timeout_s=0.1, link=CONFIG.link)
    async with cluster(config) as running, other_router(running) as second:
        await eventually(lambda: len(held(second)) == len(held(running.fleet)) == 1, "each has one")
        (lost,), (left,) = held(running.fleet), held(second)
        wanted, theirs = spec([1, 2, 3], 400), spec([7, 8, 9], 400)
        reading = asyncio.create_task(run(running.engine, wanted))
        their_reading = asyncio.create_task(run(second.engines[0], theirs))
        await eventually(lambda: running.fleet.load(lost) == 1)
        running.fleet.let_go()
        await running.stop_shard(lost)
        await eventually(lambda: held(running.fleet) == {left}, "the first has the only shard that is left")
        assert await their_reading == undisturbed(theirs)
        # The first keeps it until it has ended, while a request of the second waits.
        waiting = asyncio.create_task(run(second.engines[0], theirs))
        assert await reading == undisturbed(wanted)
        await running.end_router()
        assert await waiting == undisturbed(theirs)
        assert held(second) == {left}


async def test_a_router_that_ends_without_requests_takes_no_shard_of_another(asked: Asked) -> None:
    config = ClusterConfig(shards=2, step_s=0.005, drain_timeout_s=0.1, link=CONFIG.link)
    async with cluster(config) as running, other_router(running) as second:
        await eventually(lambda: len(held(second)) == len(held(running.fleet)) == 1, "each has one")
        (lost,), (left,) = held(running.fleet), held(second)
        running.fleet.let_go()
        await running.stop_shard(lost)
        await asked.again("first", {left})
        assert held(second) == {left}
        assert held(running.fleet) == set()


@pytest.mark.parametrize("says_goodbye", [True, False])
async def test_a_standby_takes_over_the_shards_of_a_router_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, says_goodbye: bool
) -> None:
    if not says_goodbye:
        # As if the process were killed: its connections break, and that is all.
        async def give_back(*_args: object) -> None: ...

        monkeypatch.setattr(ShardClient, "give_back", give_back)
    async with cluster(ClusterConfig(shards=2, link=CONFIG.link)) as running:
        async with other_router(running) as second:
            await eventually(lambda: len(held(second)) == 1)
            # The shard watches the connection by now.
            assert await run(second.engines[0], spec([7, 8, 9], 20)) == undisturbed(spec([7, 8, 9], 20))
        # It takes a share whose lease was renewed for longer than the wait.
        await eventually(lambda: len(held(running.fleet)) == 2, "the other has both")
