"""``/v1/requests`` over a whole Caravan: states are the scheduler's, and what is aborted leaves nothing behind."""

import asyncio
from typing import Any

from aiohttp import ClientSession

from caravan_proto.messages.limits import KvLayout
from caravan_scheduler.config import SchedulerConfig
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, cluster, generate
from caravan_testing.waiting import eventually


async def states(session: ClientSession, running: Cluster) -> dict[str, str]:
    """The state of each request in progress, by its id."""
    async with session.get(f"{running.url}/v1/requests") as response:
        return {entry["id"]: entry["state"] for entry in (await response.json())["data"]}


async def until_states(session: ClientSession, running: Cluster, **expected: str) -> None:
    await eventually(lambda: states(session, running), f"requests are {expected}", lambda found: found == expected)


async def abort(session: ClientSession, running: Cluster, request_id: str) -> None:
    async with session.delete(f"{running.url}/v1/requests/{request_id}") as response:
        assert response.status == 200


def start(session: ClientSession, running: Cluster, request_id: str, **fields: Any) -> asyncio.Task[int]:
    """Send a request that takes long. The task returns the status of its reply."""

    async def send() -> int:
        body = {"max_tokens": 1000, "ignore_eos": True, "prompt": request_id * 20, **fields}
        headers = {"X-Request-Id": request_id}
        async with session.post(f"{running.url}/v1/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    return asyncio.create_task(send())


async def test_states_are_those_of_the_scheduler_and_an_abort_ends_each() -> None:
    """One place: a higher priority takes it, and whoever lost it is swapped out."""
    log = StepLog()
    config = ClusterConfig(max_sequences=1, layout=KvLayout.SPLIT, step_s=0.002, token_s=0.001, hook=log)
    async with cluster(config) as running, ClientSession() as session:
        low = start(session, running, "low", max_tokens=3000)
        await until_states(session, running, low="running")
        second = start(session, running, "second")
        await until_states(session, running, low="running", second="queued")
        high = start(session, running, "high", max_tokens=3000, priority=1)
        await until_states(session, running, low="swapped", second="queued", high="running")
        await abort(session, running, "second")
        assert await second == 410
        # What is swapped out is aborted too.
        await abort(session, running, "low")
        assert await low == 410
        async with log.held():
            assert await states(session, running) == {"high": "running"}
            await abort(session, running, "high")
            assert await high == 410
            assert await states(session, running) == {}
        await running.wait_until_at_rest()
        await generate(session, running.url, {"inputs": "a", "parameters": {"max_new_tokens": 3}})


async def test_a_prompt_is_prefilling_while_it_is_computed() -> None:
    log = StepLog()
    scheduler = SchedulerConfig(prefix_caching=False)
    config = ClusterConfig(max_batch_tokens=16, step_s=0.01, hook=log, scheduler=scheduler)
    async with cluster(config) as running, ClientSession() as session:
        first = start(session, running, "first", prompt="x" * 1000)
        async with log.held():
            await until_states(session, running, first="prefilling")
            await abort(session, running, "first")
            assert await first == 410
        # The cells are back with the next step, long before its thousand tokens would have been computed.
        await running.wait_until_at_rest()
        assert running.engine.scheduler.shards[running.addresses[0]].cells.held == 0


async def test_every_choice_of_an_aborted_request_ends() -> None:
    async with cluster(ClusterConfig(step_s=0.002)) as running, ClientSession() as session:
        reply = start(session, running, "choices", n=3)
        await until_states(session, running, choices="running")
        async with session.get(f"{running.url}/v1/requests") as response:
            [entry] = (await response.json())["data"]
        assert len(entry["generations"]) == 3
        await abort(session, running, "choices")
        assert await reply == 410
        await running.wait_until_at_rest()
