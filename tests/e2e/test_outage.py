"""All shards are killed at once and come back: clients of any router see a pause, and nothing else."""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from caravan_testing.cluster import expected_text
from caravan_testing.programs import Program, address_of, program, url_of
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

CLIENTS = 8
NEW_TOKENS = 40
# A step of 10 ms: requests run, wait and arrive when the shards are killed.
SHARD = ("--backend=fake", "--fake-step-ms=10", "--parallel=3")
OUTAGE_S = 5.0


@dataclass
class Answers:
    """What clients got: seconds of each answer, by when it was asked for, and what was not an answer."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def between(self, start: float, end: float) -> list[float]:
        """Return the seconds of what was asked for from ``start`` until ``end``."""
        return [took for asked, took in self.seconds if start <= asked < end]


async def ask(url: str, prompt: str) -> None:
    """Ask on a connection of its own. Raises ClientError or AssertionError unless the answer is right."""
    body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    async with (
        ClientSession(connector=TCPConnector(force_close=True), timeout=ClientTimeout(total=300)) as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        assert answer["choices"][0]["text"] == expected_text(prompt, NEW_TOKENS), answer


async def ask_on(number: int, urls: list[str], answers: Answers, ended: asyncio.Event) -> None:
    """Ask one router after another, as clients of a Service do."""
    turn = number
    while not ended.is_set():
        turn += 1
        asked = time.monotonic()
        try:
            await ask(urls[turn % len(urls)], f"prompt {number}")
        except (ClientError, TimeoutError, AssertionError) as error:
            answers.failures.append(repr(error))
            await asyncio.sleep(0.1)
        else:
            answers.seconds.append((asked, time.monotonic() - asked))


@contextlib.asynccontextmanager
async def shards(addresses: list[str]) -> AsyncIterator[list[Program]]:
    """Run a shard at each address, and kill them all at the end of the block."""
    async with contextlib.AsyncExitStack() as stack:
        started = [
            await stack.enter_async_context(program("caravan_shard", f"--address={address}", *SHARD))
            for address in addresses
        ]
        for shard in started:
            await address_of(shard)
        yield started
        for shard in started:
            shard.process.kill()


async def until_more(answers: Answers, count: int) -> None:
    wanted = len(answers.seconds) + count
    await eventually(lambda: len(answers.seconds), f"{wanted} answers", lambda found: found >= wanted)


async def outage(folder: Path, routers: int, shard_count: int, outage_s: float) -> Answers:
    """Run routers and shards under load, kill all shards for ``outage_s``, and return what clients got."""
    addresses = [f"unix:{folder}/{number}.sock" for number in range(shard_count)]
    # However long it takes until the shards have started again.
    flags = [*(f"--shard={address}" for address in addresses), "--shard-grace-s=600"]
    async with contextlib.AsyncExitStack() as stack:
        answers, ended = Answers(), asyncio.Event()
        before = await stack.enter_async_context(contextlib.AsyncExitStack())
        await before.enter_async_context(shards(addresses))
        running = [
            await stack.enter_async_context(program("caravan_serve", "router", "--port=0", *flags))
            for _ in range(routers)
        ]
        urls = [await url_of(router) for router in running]
        async with asyncio.TaskGroup() as clients:
            for number in range(CLIENTS):
                clients.create_task(ask_on(number, urls, answers, ended))
            try:
                await until_more(answers, 2 * CLIENTS)
                await before.aclose()
                killed = time.monotonic()
                await asyncio.sleep(outage_s)
                assert not answers.between(killed, killed + outage_s), "somebody answered without a shard"
                await stack.enter_async_context(shards(addresses))
                back = time.monotonic()
                await until_more(answers, 4 * CLIENTS)
            finally:
                ended.set()
        for router in running:
            assert router.process.returncode is None, router.text
        usual = [took for asked, took in answers.seconds if asked + took < killed or asked > back + 5]
        print(
            f"{routers} routers, {shard_count} shards, away for {outage_s:g} s (until they listened: "
            f"{back - killed:.1f} s): {len(answers.seconds)} answers, {len(answers.failures)} failures; "
            f"usual {statistics.median(usual or [0]):.2f} s, longest {max(took for _, took in answers.seconds):.1f} s"
        )
        return answers


@pytest.mark.parametrize(("routers", "shard_count"), [(2, 1), (1, 2)])
async def test_clients_wait_while_every_shard_is_away(routers: int, shard_count: int, tmp_path: Path) -> None:
    answers = await outage(tmp_path, routers, shard_count, OUTAGE_S)
    assert answers.failures == []
    # Each client was answered after the outage, which at least one request of each lasted through.
    assert sum(took >= OUTAGE_S for _, took in answers.seconds) >= CLIENTS
