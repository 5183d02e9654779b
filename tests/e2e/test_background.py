"""Responses in the background with openai-python, while the router and its shard are killed."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import APIConnectionError, AsyncOpenAI

from caravan_testing.programs import Program, address_of, kept_ports, program, url_of
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

TOKENS = 300
KILLS = 6
BODY: dict[str, Any] = {
    "model": "any",
    "input": "Tell me everything.",
    "max_output_tokens": TOKENS,
    "temperature": 1.0,
    # One that does not end before.
    "extra_body": {"seed": 10},
}
# So slow that the response is under way when something is killed.
SHARD = ("--backend=fake", "--fake-step-ms=30", "--parallel=4")


class Servers:
    """A router, always at the same port, and a shard, each of which can be killed and started again."""

    def __init__(self, folder: Path, port: int, stack: AsyncExitStack) -> None:
        self._shard_flags = (f"--address=unix:{folder}/shard.sock", *SHARD)
        self._router_flags = (f"--port={port}", f"--shard=unix:{folder}/shard.sock", f"--state-file={folder}/state")
        self._stack = stack
        self.router: Program
        self.shard: Program
        self.client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)

    async def start_shard(self) -> None:
        self.shard = await self._stack.enter_async_context(program("caravan_shard", *self._shard_flags))
        await address_of(self.shard)

    async def start_router(self) -> None:
        self.router = await self._stack.enter_async_context(program("caravan_serve", "router", *self._router_flags))
        await url_of(self.router)


@asynccontextmanager
async def servers(folder: Path) -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        [port] = stack.enter_context(kept_ports(1))
        running = Servers(folder, port, stack)
        await running.start_shard()
        await running.start_router()
        async with running.client:
            yield running


async def read_to_the_end(client: AsyncOpenAI, response_id: str, events: list[Any]) -> None:
    """Append the events of a response, and go on after the last one when the connection is lost."""
    while not events or events[-1].type not in ("response.completed", "response.incomplete", "response.failed"):
        try:
            stream = await client.responses.retrieve(
                response_id, stream=True, starting_after=events[-1].sequence_number if events else -1
            )
            async for event in stream:
                events.append(event)  # noqa: PERF401  those before the connection is lost count
        except (APIConnectionError, httpx2.TransportError):
            # Soon again: the others go on meanwhile.
            await asyncio.sleep(0.05)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def test_a_response_outlives_kills_of_the_router_and_of_the_shard(tmp_path: Path) -> None:
    async with servers(tmp_path) as running:
        client = running.client
        undisturbed = (await client.responses.create(**BODY)).output_text
        draw = random.Random(45)
        ids = [(await client.responses.create(**BODY, background=True)).id for _ in range(3)]
        events: list[list[Any]] = [[] for _ in ids]
        reading = [
            asyncio.create_task(read_to_the_end(client, response_id, found))
            for response_id, found in zip(ids, events, strict=True)
        ]
        for kill in range(KILLS):
            wanted = len(events[0]) + draw.randrange(5, TOKENS // (2 * KILLS))
            await eventually(
                partial(len, events[0]),
                f"{wanted} events",
                partial(le, wanted),
                unless=lambda: "".join(str(task) for task in reading if task.done()),
            )
            if kill % 3 == 2:
                running.shard.process.kill()
                await running.shard.process.wait()
                await running.start_shard()
            else:
                running.router.process.kill()
                await running.router.process.wait()
                await running.start_router()
        assert not any(task.done() for task in reading), "killed too late"
        await asyncio.gather(*reading)
        for response_id, found in zip(ids, events, strict=True):
            assert [event.sequence_number for event in found] == list(range(len(found)))
            assert text_of(found) == undisturbed == found[-1].response.output_text
            whole = await client.responses.retrieve(response_id)
            assert (whole.status, whole.output_text) == ("incomplete", undisturbed)
            assert whole.usage is not None
            assert whole.usage.output_tokens == TOKENS
            again = [event async for event in await client.responses.retrieve(response_id, stream=True)]
            assert again == found


async def test_openai_python_creates_streams_resumes_and_cancels(tmp_path: Path) -> None:
    async with servers(tmp_path) as running:
        client = running.client
        body = {**BODY, "extra_body": {"seed": 11}}
        stream = await client.responses.create(**body, background=True, stream=True)
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.sequence_number == 40:
                break
        await stream.close()
        response_id = events[0].response.id
        assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
        events += [
            event async for event in await client.responses.retrieve(response_id, stream=True, starting_after=40)
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert text_of(events) == events[-1].response.output_text
        # The helper that collects a response.
        async with client.responses.stream(response_id=response_id, starting_after=0) as collected:
            final = await collected.get_final_response()
        assert final.output_text == text_of(events)

        other = await client.responses.create(**body, background=True)
        assert other.status == "queued"
        assert (await client.responses.cancel(other.id)).status == "cancelled"
        await client.responses.delete(other.id)
