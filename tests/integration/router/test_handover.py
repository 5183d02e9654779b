"""A router that starts takes over the port and the shards of the one that runs, without a failed request."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from aiohttp import ClientSession, TCPConnector

from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_router.http.server.listener import Handover
from caravan_testing.cluster import Cluster, ClusterConfig, body, cluster, expected_text
from caravan_testing.waiting import DEADLINE_S, eventually

CONFIG = ClusterConfig(shards=2, step_s=0.005, token_s=0.001)


class Router:
    """A router of its own, with the shards of a cluster."""

    def __init__(self, shards: list[str], folder: Path) -> None:
        self.config = RouterConfig(
            shard=tuple(shards), port=0, handover=str(folder / "handover"), graceful_termination_timeout=30.0
        )
        self.stop = asyncio.Event()
        self.url = ""
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        urls = asyncio.Queue[str]()
        self.task = asyncio.create_task(run_router(self.config, self.stop, lambda _fleet, url: urls.put_nowait(url)))
        self.url = await asyncio.wait_for(urls.get(), DEADLINE_S)

    async def ended(self) -> None:
        assert self.task is not None
        await asyncio.wait_for(self.task, DEADLINE_S)


@asynccontextmanager
async def shards_alone(config: ClusterConfig) -> AsyncIterator[Cluster]:
    """Run shards that the cluster's own router does not hold."""
    async with cluster(config) as running:
        running.list_shards([])
        await eventually(lambda: not running.fleet.shards(), "the shards are free")
        yield running


async def test_routers_replace_each_other_under_load(tmp_path: Path) -> None:
    async with shards_alone(replace(CONFIG, listed=True)) as running:
        routers = [Router(running.addresses, tmp_path) for _ in range(3)]
        await routers[0].start()
        url = routers[0].url
        done = asyncio.Event()
        answered = 0

        async def client(number: int) -> None:
            nonlocal answered
            # Half of the clients keep their connections.
            async with ClientSession(connector=TCPConnector(force_close=number % 2 == 0)) as session:
                turn = 0
                while not done.is_set():
                    text = f"client {number}, request {turn}"
                    async with session.post(f"{url}/generate", json=body(text, 40)) as response:
                        answer = await response.json()
                        assert response.status == 200, answer
                    assert answer["generated_text"] == expected_text(text, 40)
                    answered += 1
                    turn += 1

        async def answers(count: int) -> None:
            await eventually(lambda: answered, f"{count} requests are answered", lambda found: found >= count)

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        await answers(7)
        for old, new in pairwise(routers):
            await new.start()
            assert new.url == url
            await old.ended()
            await answers(answered + 6)
        done.set()
        await asyncio.gather(*clients)
        routers[-1].stop.set()
        await routers[-1].ended()
        assert not (tmp_path / "handover").exists()


async def test_nobody_to_take_over_from(tmp_path: Path) -> None:
    assert await Handover(tmp_path / "none").receive() is None
    # The file of a router that was killed.
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind(str(tmp_path / "left"))
    left.close()
    assert await Handover(tmp_path / "left").receive() is None
    # Something else listens there.
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.bind(str(tmp_path / "other"))
    other.listen()
    accepted = asyncio.get_running_loop().run_in_executor(None, other.accept)
    receiving = asyncio.create_task(Handover(tmp_path / "other").receive())
    connection, _ = await accepted
    connection.sendall(b"x")
    connection.close()
    assert await receiving is None
    other.close()


async def test_a_router_goes_on_if_the_next_one_dies_before_it_listens(tmp_path: Path) -> None:
    taken: list[float] = []
    listening = socket.create_server(("127.0.0.1", 0))
    path = tmp_path / "handover"
    async with Handover(path).offering(listening.fileno(), lambda: taken.append(time.monotonic())):
        first = Handover(path)
        found = await first.receive()
        assert found is not None
        assert found.getsockname() == listening.getsockname()
        found.close()
        assert first._before is not None
        first._before.close()
        second = Handover(path)
        found = await second.receive()
        assert found is not None
        assert not taken
        second.confirm()
        await eventually(lambda: bool(taken), "the second listens")
        found.close()
    listening.close()
