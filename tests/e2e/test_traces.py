"""A collector receives the traces of a preempted and a migrated request of real processes with the real model.

`tests/integration/router/test_traces.py` has the same with toy shards.
"""

import asyncio
import json

import pytest
from aiohttp import ClientSession

from caravan_testing.otlp_receiver import ReceivedSpan, Receiver, grpc_receiver
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

# One sequence on each shard, so that a third request needs the place of another.
FLAGS = ("--shards", "2", "-np", "1", "-c", "1024", "-t", "1", "--json-output")


class Generation:
    """A stream of ``new_tokens`` tokens; ``seen`` of them have come."""

    def __init__(self, session: ClientSession, request_id: str, new_tokens: int, priority: int = 0) -> None:
        self.seen = 0
        parameters = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        self._body = {"inputs": f"The history of {request_id} begins", "parameters": parameters, "priority": priority}
        self.ended = asyncio.create_task(self._read(session, request_id))

    async def _read(self, session: ClientSession, request_id: str) -> None:
        headers = {"X-Request-Id": request_id}
        async with session.post("/generate_stream", json=self._body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                self.seen += line.startswith(b"data:")


async def shards(session: ClientSession) -> list[tuple[str, int]]:
    """Return the addresses of all shards and the number of their sequences."""
    listed = (await (await session.get("/admin/shards")).json())["shards"]
    return [(one["address"], one["sequences"]) for one in listed]


async def preempt(session: ClientSession) -> None:
    """Fill both shards, and let a third request of a higher priority take the place of one."""
    low = [Generation(session, request_id, 200) for request_id in ("bread", "salt")]
    await eventually(lambda: all(one.seen for one in low), "both have tokens")
    await Generation(session, "gold", 10, priority=5).ended
    await asyncio.gather(*(one.ended for one in low))


async def migrate(session: ClientSession) -> str:
    """Drain the shard of a request while it runs; return the shard's address."""
    moving = Generation(session, "ships", 250)
    await eventually(lambda: bool(moving.seen), "it has tokens")
    [leaving] = [address for address, count in await shards(session) if count]
    async with session.post(f"/admin/shards/{leaving.replace('/', '%2F')}/drain") as response:
        assert response.status == 200, await response.text()
    await moving.ended
    return leaving


async def run(served: Served, receiver: Receiver) -> str:
    async with ClientSession(served.url) as session:
        await preempt(session)
        leaving = await migrate(session)
        await eventually(lambda: all(receiver.span(name) for name in ("bread", "salt", "gold", "ships")), "all spans")
        return leaving


def shard_lines(served: Served, span: ReceivedSpan) -> list[str]:
    """Return the messages of the shards' logs about a trace."""
    found = [json.loads(line) for line in served.log if span.trace_id in line]
    return [line["message"] for line in found if line["logger"].startswith("caravan_shard.")]


def test_traces_of_a_preempted_and_a_migrated_request() -> None:
    with grpc_receiver() as receiver:
        flags = ("--otlp-endpoint", receiver.endpoint, "--otlp-service-name", "tested")
        with serve(*FLAGS, *flags) as served:
            leaving = asyncio.run(run(served, receiver))
        spans = {span.attributes["caravan.request_id"]: span for span in receiver.spans}
    assert {span.resource["service.name"] for span in spans.values()} == {"tested"}

    [preempted] = [spans[name] for name in ("bread", "salt") if "preempted" in spans[name].event_names]
    names = [name for name in preempted.event_names if name != "migrated"]
    assert names == ["queued", "started", "first_token", "preempted", "resumed", "finished"]
    assert preempted.attributes["gen_ai.usage.output_tokens"] == 200
    assert shard_lines(served, preempted)[-2:] == ["sequence started", "sequence ended"]
    assert shard_lines(served, preempted).count("sequence started") == 2

    migrated = spans["ships"]
    assert migrated.event_names == ["queued", "started", "first_token", "preempted", "migrated", "resumed", "finished"]
    assert migrated.event("migrated")["caravan.shard.from"] == leaving
    assert migrated.event("migrated")["caravan.shard.to"] == migrated.event("resumed")["caravan.shard"] != leaving
    assert shard_lines(served, migrated).count("sequence started") == 2
