"""Which request goes first, on the toy model: priorities, fair shares and deadlines."""

import asyncio
import re
from collections import Counter

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_router.engine.link_config import LinkConfig
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.errors import DeadlineError, EngineError, QueueTimeoutError
from caravan_scheduler.core.generation import GenerationSpec, Tenant
from caravan_testing.cluster import Cluster, ClusterConfig, StepLog, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import eventually

MARK = 255
MARKS = 40


async def until_settled(running: Cluster, log: StepLog) -> None:
    """Wait until the router knows of every step before the one that is held."""

    async def known() -> float:
        text = (await running.metrics.render()).decode()
        return sum(map(float, re.findall(r"^tgi_batch_inference_success\S* (\S+)$", text, re.MULTILINE)))

    await eventually(known, "the router knows of all steps", lambda count: count == len(log.steps) - 1)


async def delays_of_one(running: Cluster, log: StepLog, number: int) -> tuple[int, int]:
    """Send a request of high priority while a step runs.

    Return how many steps ran without it from that one on until its prompt was computed, and how many commands the shard
    had already.
    """
    (address,) = running.addresses
    shard = running.engine.scheduler.shards[address]
    wanted = spec([number, *[MARK] * MARKS], 3, priority=10)
    async with log.held():
        await until_settled(running, log)
        sent = list(shard.commands.in_flight)
        stream = running.engine.submit(wanted)
        begun = len(log.steps)
        if sent[0].is_decode:
            # The next command reaches the shard before the step ends, as it does when steps take longer; or it is the
            # one that runs, and the Decode has ended.
            await eventually(
                lambda: running.queued_commands(address) > 0 or sent[0] not in shard.commands.in_flight,
                "the shard knows",
            )
        if len(sent) == 2 and sent[1].is_decode:
            # It gives way once the command for the request is there, for which the router must hear that the first has
            # ended.
            await log.next_step()
            await eventually(
                lambda: running.queued_commands(address) > 0 or sent[1] not in shard.commands.in_flight,
                "the shard knows of the command behind",
            )
    assert await read(stream) == undisturbed(wanted)
    steps = log.steps[begun:]
    last = next(place for place in range(len(steps)) if sum(step.count(MARK) for step in steps[: place + 1]) >= MARKS)
    return 1 + sum(MARK not in tokens for tokens in steps[:last]), len(sent)


@pytest.mark.parametrize("saved_bytes", [1 << 20, 0], ids=["swap", "recompute"])
@pytest.mark.parametrize("layout", list(KvLayout), ids=lambda layout: layout.value)
async def test_a_flood_delays_a_higher_priority_by_the_step_that_runs(layout: KvLayout, saved_bytes: int) -> None:
    """A hundred requests of low priority hold all sequence ids. Only commands that the shard has already go first."""
    log = StepLog()
    config = ClusterConfig(
        layout=layout,
        cells=512,
        max_sequences=4,
        token_s=0.0002,
        saved_bytes=saved_bytes,
        hook=log,
        # The router hears of each step before the next one ends.
        link=LinkConfig(router_id="test", heartbeat_s=0.2, silence_s=20.0, stream_interval_ms=0),
    )
    async with cluster(config) as running:
        (shard,) = running.engine.scheduler.shards.values()
        flood = [spec([number] * 20, 30 + number % 7) for number in range(100)]
        reading = [asyncio.create_task(run(running.engine, one)) for one in flood]
        await eventually(lambda: len(shard.stays.decoding) == 4, "the shard is full")
        delays = [await delays_of_one(running, log, number) for number in range(200, 220)]
        # One more step of the others may run while the one that makes room is saved.
        assert all(1 <= steps <= commands + 1 <= 3 for steps, commands in delays), delays
        assert (1, 1) in delays
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in flood]
        counts = {
            how: await running.metric(f'caravan_request_preemptions_total{{how="{how}"}}')
            for how in ("swap", "recompute")
        }
        assert counts["swap" if saved_bytes else "recompute"] > 0
        await running.wait_until_at_rest()


@pytest.mark.parametrize("weight", [1.0, 3.0, None], ids=["weight-1", "weight-3", "sessions"])
async def test_tokens_are_shared_by_weight_while_both_wait(weight: float | None) -> None:
    """One tenant, or one session of a tenant, sends twenty times as many requests as the other."""
    served: list[str] = []
    async with cluster(ClusterConfig(max_sequences=4)) as running:

        def asked(name: str, number: int) -> GenerationSpec:
            prompt = [number % 256, number // 256, len(name)] * 5
            if weight is None:
                return spec(prompt, 8, session=name)
            return spec(prompt, 8, tenant=Tenant(name=name, weight=weight if name == "modest" else 1.0))

        async def client(name: str, number: int) -> None:
            async for tokens in running.engine.submit(asked(name, number)):
                served.extend([name] * len(tokens))
            if name == "modest":
                last_modest.append(len(served))

        last_modest: list[int] = []
        everyone = [("greedy", number) for number in range(800)] + [("modest", number) for number in range(40)]
        await asyncio.gather(*(client(*one) for one in everyone))
        await running.wait_until_at_rest()
    counts = Counter(served[: last_modest[-4]])  # while its last ones run, its share of the places goes to others
    share = counts["modest"] / counts["greedy"]
    assert 0.9 < share / (weight or 1.0) < 1.1, counts


async def failures(running: Cluster, reading: list[asyncio.Task[list[int]]]) -> list[type[BaseException]]:
    """Wait for all requests and return the types of their errors."""
    results = await asyncio.gather(*reading, return_exceptions=True)
    return [type(result) for result in results if isinstance(result, BaseException)]


async def test_a_request_that_does_not_end_in_time_fails_wherever_it_is() -> None:
    """The requests run, wait or are swapped out while the shard stands still. Afterwards it holds nothing of them."""
    log = StepLog()
    async with cluster(ClusterConfig(cells=256, max_sequences=4, token_s=0.0002, hook=log)) as running:
        low = [spec([number] * 20, 40, timeout_s=0.5) for number in range(6)]
        reading = [asyncio.create_task(run(running.engine, one)) for one in low]
        await eventually(lambda: running.queued_commands(running.addresses[0]) == 0, "it began")
        async with log.held():
            high = [spec([100 + number] * 40, 20, priority=1, timeout_s=0.5) for number in range(2)]
            reading += [asyncio.create_task(run(running.engine, one)) for one in high]
            assert await failures(running, reading) == [DeadlineError] * len(reading)
        await running.wait_until_at_rest()
        assert await run(running.engine, spec([1], 5)) == undisturbed(spec([1], 5))


async def test_a_request_whose_turn_does_not_come_in_time_fails() -> None:
    """Requests that have started run to their end."""
    log = StepLog()
    config = ClusterConfig(max_sequences=2, hook=log, scheduler=SchedulerConfig(queue_timeout_s=2.0))
    async with cluster(config) as running:
        wanted = [spec([number] * 20, 40) for number in range(2)]
        reading = [asyncio.create_task(run(running.engine, one)) for one in wanted]
        async with log.held():
            errors: list[type[EngineError]] = []
            late = [asyncio.create_task(run(running.engine, spec([9], 5))) for _ in range(5)]
            errors += await failures(running, late)  # type: ignore[arg-type]
            assert errors == [QueueTimeoutError] * 5
        assert await asyncio.gather(*reading) == [undisturbed(one) for one in wanted]
        await running.wait_until_at_rest()
