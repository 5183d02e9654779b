"""Random trees of conversations on the toy model, while shards are lost and others want the cells.

Whatever a conversation went through, what it generates is what its items give when they are sent from the start.
"""

import asyncio
import itertools
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_scheduler.config import SchedulerConfig
from caravan_shard.backends.base import TokenBatch
from caravan_testing.cluster import Cluster, ClusterConfig, cluster
from caravan_testing.specs import read, run, spec, undisturbed
from caravan_testing.waiting import DEADLINE_S, eventually

WALKERS = 4
STEPS = 20
MOST_ITEMS = 12
CELLS = 1024
RESPONSES_PER_LOSS = 4


class Walker:
    """Changes the conversations of a tree at random, and compares each response with a stateless one."""

    def __init__(self, session: ClientSession, seed: int) -> None:
        self._session = session
        self._chance = random.Random(seed)
        self._conversations: list[str] = []
        self.responses = self.cached_tokens = 0

    async def walk(self) -> None:
        self._conversations.append((await self._post("", {"items": [self._message("system")]}))["id"])
        for _ in range(STEPS):
            conversation = self._chance.choice(self._conversations)
            items = await self._items(conversation)
            if len(items) > MOST_ITEMS:
                await self._post(f"/{conversation}/shift", {"keep": 1, "drop": 6})
                continue
            match self._chance.randrange(8):
                case 0:
                    at = self._chance.choice(items)["id"] if items else None
                    self._conversations.append((await self._post(f"/{conversation}/fork", {"at": at}))["id"])
                case 1 if items:
                    await self._post(f"/{conversation}/rewind", {"to": self._chance.choice(items)["id"]})
                case 2 if items:
                    await self._edit(conversation, items)
                case 3:
                    await self._post(f"/{conversation}/items", {"items": [self._message("user")]})
                case 4:
                    export = await self._get(f"/{conversation}/export")
                    self._conversations.append((await self._post("", {"import": export}))["id"])
                case _:
                    await self._respond(conversation, items)

    async def _edit(self, conversation: str, items: list[Any]) -> None:
        item = self._chance.choice(items)["id"]
        operations = [
            {"op": "insert", "after": item, "items": [self._message("user")]},
            {"op": "replace", "item": item, "items": [self._message("assistant")]},
            {"op": "delete", "item": item},
        ]
        chosen = self._chance.choice(operations)
        await self._post(f"/{conversation}/edit", {"operations": [chosen]})

    async def _respond(self, conversation: str, items: list[Any]) -> None:
        common = {
            "max_output_tokens": self._chance.randrange(4, 40),
            "seed": self._chance.randrange(1000),
            "temperature": self._chance.choice([0, 1]),
        }
        message = self._message("user")
        stated = await self._generate({**common, "conversation": conversation, "input": [message]})
        sent = await self._generate({**common, **self._apart(), "store": False, "input": [*items, message]})
        assert sent["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert stated["output"][0]["content"] == sent["output"][0]["content"], items
        assert stated["usage"]["output_tokens"] == sent["usage"]["output_tokens"]
        assert (await self._items(conversation))[-1] == stated["output"][0]
        self.responses += 1
        self.cached_tokens += stated["usage"]["input_tokens_details"]["cached_tokens"]

    def _apart(self) -> dict[str, str]:
        """Return fields of a request that uses nothing of what others have computed."""
        return {"cache_salt": f"{id(self)} {self.responses}"}

    def _message(self, role: str) -> dict[str, str]:
        text = " ".join(self._chance.choice(["sea", "tree", "<|im_end|>", "star", "ö"]) for _ in range(4))
        return {"role": role, "content": text}

    async def _items(self, conversation: str) -> list[Any]:
        listed = await self._get(f"/{conversation}/items?order=asc&limit=100")
        assert isinstance(listed["data"], list)
        return listed["data"]

    async def _get(self, path: str) -> Any:
        async with self._session.get(f"/v1/conversations{path}") as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def _post(self, path: str, body: Any) -> Any:
        async with self._session.post(f"/v1/conversations{path}", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def _generate(self, body: Any) -> Any:
        async with self._session.post("/v1/responses", json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()


async def lose_shards(running: Cluster, walkers: Sequence[Walker], ended: asyncio.Event) -> int:
    """Stop one shard after another, and start each again, until ``ended``. Return how many were lost.

    Responses part the losses and not time, so that a slow host too computes between two of them.
    """

    async def more_responses(due: int) -> None:
        await eventually(
            lambda: sum(walker.responses for walker in walkers),
            f"the walkers have {due} responses, or end",
            lambda found: found >= due or ended.is_set(),
        )

    for lost, address in enumerate(itertools.cycle(running.addresses)):
        await more_responses(sum(walker.responses for walker in walkers) + RESPONSES_PER_LOSS)
        if ended.is_set():
            return lost
        await running.stop_shard(address)
        await running.start_shard(address)
    raise AssertionError("the shards have no end")


async def compete(running: Cluster, ended: asyncio.Event) -> None:
    """Run long outputs of a higher priority, which take the cells of others, until ``ended``."""
    number = 0
    while not ended.is_set():
        number += 1
        await run(running.engine, spec([number % 256] * 200, 100, seed=number, priority=1))


@pytest.mark.parametrize("whole_only", [False, True], ids=["cells", "recurrent state"])
async def test_a_tree_of_conversations_generates_what_its_items_do(*, whole_only: bool) -> None:
    config = ClusterConfig(
        shards=2,
        cells=CELLS,
        max_sequences=8,
        whole_only=whole_only,
        token_s=0.00005,
        drain_timeout_s=0.0,
        scheduler=SchedulerConfig(max_fatal_losses=1000, max_losses=1000, no_shard_grace_s=60.0),
    )
    async with cluster(config) as running, ClientSession(running.url) as session:
        ended = asyncio.Event()
        walkers = [Walker(session, number) for number in range(WALKERS)]
        disturbing = asyncio.gather(
            lose_shards(running, walkers, ended), compete(running, ended), compete(running, ended)
        )
        try:
            await asyncio.gather(*(walker.walk() for walker in walkers))
        finally:
            ended.set()
            lost, *_ = await disturbing
        await running.wait_until_at_rest()
        assert all(walker.responses for walker in walkers)
        assert sum(walker.cached_tokens for walker in walkers) > 0
        assert lost > 0


class Pause:
    """The hook of a shard: after `arm`, a step over a single token waits until `release`."""

    def __init__(self) -> None:
        self._armed, self._released = threading.Event(), threading.Event()
        self._before = 0
        self.has_begun = threading.Event()

    def __call__(self, batch: TokenBatch) -> None:
        if self._armed.is_set() and len(batch.tokens) == 1:
            self._before -= 1
            if self._before < 0:
                self.has_begun.set()
                assert self._released.wait(DEADLINE_S)

    def arm(self, before: int = 0) -> None:
        """Let the first step over a single token wait that comes after so many others."""
        self._before = before
        self._armed.set()

    def release(self) -> None:
        self._armed.clear()
        self._released.set()


async def test_a_preempted_response_is_what_its_items_give() -> None:
    """A request of a higher priority needs the cells of a response that has just begun."""
    pause, cells = Pause(), 256
    async with cluster(ClusterConfig(cells=cells, hook=pause)) as running, ClientSession(running.url) as session:
        walker = Walker(session, 1)
        items = [{"role": "user", "content": "the sea"}]
        fields = {"max_output_tokens": 60, "temperature": 0}
        sent = await walker._generate({**fields, "store": False, "input": items})
        used, output = sent["usage"]["total_tokens"], sent["usage"]["output_tokens"]
        assert output > 20
        rival = spec([7] * (cells - used), 40, priority=1)

        pause.arm()
        conversation = (await walker._post("", {}))["id"]
        stated = asyncio.create_task(walker._generate({**fields, "conversation": conversation, "input": items}))
        await eventually(pause.has_begun.is_set, "the response decodes")
        stream = running.engine.submit(rival)
        # The running Decode yields to it after the step that waits.
        await eventually(lambda: running.queued_commands(running.addresses[0]) > 0, "a command for the rival")
        pause.release()

        assert await read(stream) == undisturbed(rival)
        assert (await stated)["output"][0]["content"] == sent["output"][0]["content"]
        preempted = [
            await running.metric(f'caravan_request_preemptions_total{{how="{how}"}}') for how in ("swap", "recompute")
        ]
        assert sum(preempted) == 1
        await running.wait_until_at_rest()


async def test_a_fork_of_a_response_under_way_starts_from_what_was_generated() -> None:
    pause = Pause()
    # Each token is sent at once.
    config = ClusterConfig(hook=pause, link=replace(ClusterConfig().link, stream_interval_ms=0))
    async with cluster(config) as running, ClientSession(running.url) as session:
        walker = Walker(session, 1)
        items = [{"role": "user", "content": "the sea"}]
        fields = {"max_output_tokens": 60, "temperature": 0}
        prompt = (await walker._generate({**fields, "max_output_tokens": 1, "store": False, "input": items}))["usage"]
        conversation = (await walker._post("", {}))["id"]
        pause.arm(before=20)
        body = {**fields, "conversation": conversation, "input": items, "stream": True}
        async with session.post("/v1/responses", json=body) as response:
            text, response_id, event = "", "", dict[str, Any]()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                response_id = response_id or event["response"]["id"]
                text += event.get("delta", "")
                if len(text) >= 15:
                    break
            await eventually(pause.has_begun.is_set, "it decodes")
            fork = (await walker._post(f"/{conversation}/fork", {"at": response_id}))["id"]
            known = await walker._items(fork)
            assert known[-1]["content"][0]["text"].startswith(text)
            question = [{"role": "user", "content": "and then?"}]
            asked = asyncio.create_task(walker._generate({**fields, "conversation": fork, "input": question}))
            await eventually(lambda: running.queued_commands(running.addresses[0]) > 0, "a command for the fork")
            pause.release()
            answer = await asked
            async for line in response.content:
                event = json.loads(line[len(b"data: ") :]) if line.startswith(b"data: {") else event
        assert event["response"]["usage"]["output_tokens"] > 20
        # A letter is a token. Of what was generated, the last token may not be in a cell.
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] >= prompt["input_tokens"] + len(text) - 1
        sent = await walker._generate({**fields, "store": False, "input": [*known, *question]})
        assert answer["output"][0]["content"] == sent["output"][0]["content"]
        await running.wait_until_at_rest()
