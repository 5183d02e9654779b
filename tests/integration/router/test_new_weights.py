"""Shards with other weights take over the name of a model, on toy models over real gRPC."""

import asyncio
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_router.engine import fleet
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.shards import ShardState
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import run, spec, undisturbed
from caravan_testing.waiting import eventually

NEW = "toy-2"


async def ask(session: ClientSession, running: Cluster, prompt: str, tokens: int) -> dict[str, Any]:
    """Return the status and the body of a completion."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{running.url}/v1/completions", json=body) as response:
        return {"status": response.status, **await response.json()}


async def start_new(running: Cluster, vocabulary: str = "toy-vocabulary") -> str:
    address = running.add_address()
    await running.start_shard(address, file=NEW, vocabulary_fingerprint=vocabulary)
    return address


async def set_list(running: Cluster, *addresses: str) -> None:
    await asyncio.to_thread(running.list_shards, addresses)


async def until_serving(running: Cluster, address: str) -> None:
    """Wait until the shard's scheduler has it, too."""
    await eventually(lambda: any(address in one.scheduler.shards for one in running.every_engine), f"{address} serves")


def serves(running: Cluster) -> str:
    return running.engine.model.fingerprint


async def test_the_name_moves_when_as_many_new_shards_serve_as_old_ones() -> None:
    async with cluster(ClusterConfig(shards=2, listed=True)) as running, ClientSession() as session:
        first, second = running.addresses
        new = await start_new(running)
        await set_list(running, first, second, new)
        await until_serving(running, new)
        assert serves(running) == "toy-1"
        assert (await ask(session, running, "x", 3))["system_fingerprint"] == "toy-1"
        async with session.get(f"{running.url}/v1/models") as response:
            assert [entry["id"] for entry in (await response.json())["data"]] == ["toy"]
        async with session.get(f"{running.url}/admin/shards") as response:
            shards = (await response.json())["shards"]
        assert [(one["model"], one["model_fingerprint"], one["state"]) for one in shards] == [
            ("toy", "toy-1", "serving"),
            ("toy", "toy-1", "serving"),
            ("toy", NEW, "serving"),
        ]
        # Two kinds of weights of one name are still one model: it answers to every name.
        assert not running.fleet.names.strict
        await set_list(running, first, new)
        await eventually(lambda: running.state(second) is None, "the old one is forgotten")
        assert serves(running) == NEW
        assert (await ask(session, running, "x", 3))["system_fingerprint"] == NEW
        await running.stop_shard(second)
        await set_list(running, new)
        await eventually(lambda: len(running.fleet._runs) == 1, "the old engine has ended")
        assert running.fleet.healthy
        await running.stop_shard(first)
        await running.wait_until_at_rest()


async def test_what_waits_and_runs_on_the_last_old_shard_goes_on_with_the_new_weights() -> None:
    config = ClusterConfig(shards=1, listed=True, max_sequences=2, step_s=0.01)
    async with cluster(config) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        wanted = [spec([number, 7, 8], 60) for number in range(6)]
        asked = [asyncio.create_task(run(first, one)) for one in wanted]
        await eventually(
            lambda: sum(len(one.output) > 3 for one in first.scheduler.sequences.values()) == 2, "two run, four wait"
        )
        tokenizing = asyncio.create_task(ask(session, running, "x", 3))
        await running.stop_shard(old)
        new = await start_new(running)
        await set_list(running, new)
        assert await asyncio.gather(*asked) == [undisturbed(one) for one in wanted]
        assert (await tokenizing)["status"] == 200
        assert serves(running) == NEW
        await eventually(lambda: not running.fleet._leaving, "the old engine has ended")
        await running.wait_until_at_rest()


async def test_a_stream_is_cancelled_after_it_has_moved() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True, step_s=0.01)) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        asked = asyncio.create_task(ask(session, running, "x", 3000))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        new = await start_new(running)
        await set_list(running, new)
        await eventually(lambda: serves(running) == NEW and bool(running.engine.scheduler.sequences), "it has moved")
        asked.cancel()
        await eventually(lambda: not running.engine.scheduler.sequences, "it is released")
        await running.wait_until_at_rest()


async def test_what_waits_for_a_model_of_another_vocabulary_is_told_that_it_was_replaced() -> None:
    async with cluster(ClusterConfig(shards=1, listed=True, step_s=0.01)) as running, ClientSession() as session:
        (old,) = running.addresses
        first = running.engine
        runs = asyncio.create_task(ask(session, running, "x", 3000))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        # This one is not tokenized yet.
        waits = asyncio.create_task(ask(session, running, "y", 3))
        await eventually(lambda: first.queries.waiting == 1, "the other waits")
        new = await start_new(running, vocabulary="other")
        await set_list(running, new)
        for answer in await asyncio.gather(runs, waits):
            assert (answer["status"], answer["error"]["code"]) == (503, "model_replaced")
            assert answer["error"]["message"] == (
                "The model toy was replaced by another one while the request waited: send it again"
            )
        assert (await ask(session, running, "x", 3))["status"] == 200
        await running.wait_until_at_rest()


async def test_requests_are_given_up_to_the_new_weights_while_the_old_address_is_still_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache of DNS may list a pod that has ended for longer than requests wait for a shard."""
    monkeypatch.setattr(fleet, "_REPLACED_S", 0.2)
    config = ClusterConfig(shards=1, listed=True, step_s=0.01, scheduler=SchedulerConfig(no_shard_grace_s=1000.0))
    async with cluster(config) as running:
        (old,) = running.addresses
        first = running.engine
        new = await start_new(running)
        await set_list(running, old, new)
        await until_serving(running, new)
        assert serves(running) == NEW
        # One that came before that.
        wanted = spec([1, 2, 3], 200)
        reading = asyncio.create_task(run(first, wanted))
        await eventually(lambda: any(one.output for one in first.scheduler.sequences.values()), "it runs")
        await running.stop_shard(old)
        assert await reading == undisturbed(wanted)
        assert running.state(old) is ShardState.LOST
        await eventually(lambda: not running.fleet._leaving, "the old engine has ended")
        # It may come back with either weights.
        await running.start_shard(old)
        await until_serving(running, old)
        await running.wait_until_at_rest()
