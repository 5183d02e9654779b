"""Two routers behind nginx share a PostgreSQL database; one is killed under load, and nothing is lost."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from openai import APIConnectionError, AsyncOpenAI, InternalServerError

from caravan_testing.nginx import nginx
from caravan_testing.postgres import cluster
from caravan_testing.programs import Program, address_of, program, url_of
from caravan_testing.waiting import DEADLINE_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

T = TypeVar("T")
TOKENS, RESPONSES, LINES = 200, 8, 300
BODY: dict[str, Any] = {
    "model": "any",
    "input": "Tell me everything.",
    "max_output_tokens": TOKENS,
    "temperature": 1.0,
    # One that does not end before.
    "extra_body": {"seed": 10},
}
SHARD = ("--backend=fake", "--fake-step-ms=10", "--parallel=32", "--ctx-size=32768")
# What a client sees of a killed router: a lost connection, or nginx's 502.
LOST = (APIConnectionError, InternalServerError, httpx2.TransportError)


@asynccontextmanager
async def routers(folder: Path) -> AsyncIterator[tuple[AsyncOpenAI, list[Program]]]:
    """Start two shards, two routers and nginx, and yield a client of nginx and the routers."""
    async with AsyncExitStack() as stack:
        database = await asyncio.to_thread(cluster().new_database)
        flags = ["--port=0", f"--state-url={database}"]
        for number in range(2):
            address = f"unix:{folder}/shard{number}.sock"
            shard = await stack.enter_async_context(program("caravan_shard", f"--address={address}", *SHARD))
            await address_of(shard)
            flags.append(f"--shard={address}")
        running = [await stack.enter_async_context(program("caravan_serve", "router", *flags)) for _ in range(2)]
        urls = [await url_of(router) for router in running]
        url = await stack.enter_async_context(nginx(folder, *(url.removeprefix("http://") for url in urls)))
        for direct in urls:
            await eventually(lambda: _is_serving(direct), f"{direct} has a shard")  # noqa: B023  awaited at once
        yield await stack.enter_async_context(AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)), running


async def _is_serving(url: str) -> bool:
    async with httpx2.AsyncClient(timeout=DEADLINE_S) as client:
        return (await client.get(f"{url}/health")).status_code == 200


async def until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask again while the request meets the killed router."""
    return await eventually(ask, "the other router answers", lambda _: True, ignoring=LOST)


async def read_to_the_end(client: AsyncOpenAI, response_id: str, events: list[Any]) -> None:
    """Append the events of a response, and go on after the last one when the connection is lost."""

    async def read() -> None:
        number = events[-1].sequence_number if events else -1
        async for event in await client.responses.retrieve(response_id, stream=True, starting_after=number):
            events.append(event)  # noqa: PERF401  those before the connection is lost count

    while not events or events[-1].type not in ("response.completed", "response.incomplete", "response.failed"):
        await until_answered(read)


async def chat(client: AsyncOpenAI, killed: asyncio.Event) -> None:
    """Continue one conversation, turn after turn, until some turns after the kill."""

    async def ask(text: str, previous: str | None) -> str:
        response = await client.responses.create(
            model="any", input=text, max_output_tokens=20, previous_response_id=previous
        )
        return response.id

    last: str | None = None
    turns = 0
    while not killed.is_set() or turns < 3:
        last = await until_answered(partial(ask, f"Turn {turns}", last))
        turns = turns + 1 if killed.is_set() else 0
    assert last is not None


async def batch(client: AsyncOpenAI) -> str:
    """Begin a batch."""
    lines = []
    for number in range(LINES):
        body = {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 1 + number % 3}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        lines.append(json.dumps(line))
    file = await client.files.create(file=io.BytesIO("\n".join(lines).encode()), purpose="batch")
    begun = await client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return begun.id


async def check_batch(client: AsyncOpenAI, batch_id: str) -> None:
    """Wait for the end of a batch, each of whose lines must be answered once."""
    ended = await eventually(
        lambda: until_answered(lambda: client.batches.retrieve(batch_id)),
        "the batch ends",
        lambda one: one.status not in ("validating", "in_progress", "finalizing"),
    )
    assert (ended.status, ended.error_file_id) == ("completed", None)
    content = await until_answered(lambda: client.files.content(ended.output_file_id or ""))
    answers = [json.loads(line) for line in content.text.splitlines()]
    assert [one["custom_id"] for one in answers] == [f"r{number}" for number in range(LINES)]
    assert {one["response"]["status_code"] for one in answers} == {200}


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_router_that_is_killed_under_load_loses_nothing(tmp_path: Path, victim: int) -> None:
    async with routers(tmp_path) as (client, running):
        undisturbed = (await client.responses.create(**BODY)).output_text
        killed = asyncio.Event()
        # nginx gives them to the routers by turns.
        ids = [(await client.responses.create(**BODY, background=True)).id for _ in range(RESPONSES)]
        batches = [await batch(client) for _ in range(2)]
        events: list[list[Any]] = [[] for _ in ids]
        async with asyncio.TaskGroup() as group:
            for response_id, found in zip(ids, events, strict=True):
                group.create_task(read_to_the_end(client, response_id, found))
            for _ in range(4):
                group.create_task(chat(client, killed))
            # The others wait, have begun or are behind: none has ended.
            await eventually(lambda: max(map(len, events)) > 20, "a response is under way")
            running[victim].process.kill()
            await running[victim].process.wait()
            killed.set()
            for batch_id in batches:
                group.create_task(check_batch(client, batch_id))
        for found in events:
            assert [event.sequence_number for event in found] == list(range(len(found)))
            text = "".join(event.delta for event in found if event.type == "response.output_text.delta")
            assert text == undisturbed == found[-1].response.output_text
