"""Stops shards of `caravan serve`: drained for an operator, or unloaded with their model. The server goes on."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from caravan_proto.channel import client_options
from caravan_proto.shard.v1 import shard_pb2_grpc
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.config import ShardConfig
from caravan_shard.service.server import ShardServer
from caravan_testing.programs import command_line
from caravan_testing.serve_process import Served
from caravan_testing.shard_harness import RunningShard
from caravan_testing.waiting import eventually
from stops.callers import HANGS_S, Callers, StoppedModel
from stops.tally import Stopped, Tally, faults_in

_TEXTS = (70, 3_000, 30_000, 60_000)
# So many stops do not wait until calls of all kinds have been answered.
_EARLY_SHARE = 0.1
_LONGEST_PAUSE_S = 0.4


class ServedStops:
    """Stops shards of a server, one after another. ``session``: to the server."""

    def __init__(self, served: Served, session: aiohttp.ClientSession) -> None:
        self._served = served
        self._session = session
        # Lines of the log that were looked at.
        self._read = 0

    async def drain(self, model: StoppedModel, seed: int) -> Stopped:
        """Have one of the two shards of the only model drained, which is started again."""
        stopped = Stopped("admin", model.name)
        shard = random.Random(seed).choice(await self._serving(2))
        pid = self._pid(f"--shard-id {shard} ")

        async def ask() -> None:
            # On a busy host the router may just have given the shard up, and takes it again.
            status = 404
            while status == 404:
                async with self._session.post(f"/admin/shards/{shard}/drain") as response:
                    status = response.status
                    assert status in (200, 202, 204, 404), await response.text()
                await asyncio.sleep(0.02)

        # Another shard answers meanwhile, so requests go on.
        await self._stop(stopped, model, pid, seed, ask)
        await self._find_end(stopped, f"shard={shard}")
        return stopped

    async def unload(self, model: StoppedModel, seed: int) -> Stopped:
        """Have a model loaded and unloaded. Each request to the server comes before that, and is answered."""
        stopped = Stopped("unload", model.name)
        await self._ask("load", model.name)
        await self._until_model_is(model.name, "loaded")
        await self._stop(stopped, model, self._pid(f"--alias={model.name} "), seed, lambda: self._unload(model.name))
        await self._find_end(stopped, f"shard={model.name}-0")
        return stopped

    async def _unload(self, name: str) -> None:
        await self._ask("unload", name)

    async def _ask(self, what: str, name: str) -> None:
        async with self._session.post(f"/models/{what}", json={"model": name}) as response:
            assert response.status == 200, await response.text()

    async def _until_model_is(self, name: str, wanted: str) -> None:
        async with asyncio.timeout(HANGS_S):
            while True:
                async with self._session.get("/models") as response:
                    states = {one["id"]: one["status"]["value"] for one in (await response.json())["data"]}
                if states[name] == wanted:
                    return
                await asyncio.sleep(0.02)

    async def _serving(self, count: int) -> list[str]:
        """Wait until so many shards serve, and return their ids."""
        async with asyncio.timeout(HANGS_S):
            while True:
                async with self._session.get("/admin/shards") as response:
                    shards = (await response.json())["shards"]
                serving = [one["shard_id"] for one in shards if one["state"] == "serving"]
                if len(serving) == count:
                    return serving
                await asyncio.sleep(0.02)

    def _is_alive(self, pid: int) -> bool:
        return Path(f"/proc/{pid}").exists() and self._served.process.poll() is None

    def _pid(self, words: str) -> int:
        (pid,) = [pid for pid in self._served.shard_pids() if words in _command(pid)]
        return pid

    async def _stop(
        self, stopped: Stopped, model: StoppedModel, pid: int, seed: int, ask: Callable[[], Awaitable[None]]
    ) -> None:
        """Call the shard ``pid`` and the server, ``ask`` for the shard's end, and wait for it."""
        chance, tally = random.Random(seed), Tally()
        address = _command(pid).partition("--address ")[2].split()[0]
        async with grpc.aio.insecure_channel(address, options=client_options()) as channel:
            stub = shard_pb2_grpc.ShardServiceStub(channel)
            server = ShardServer(ShardConfig(backend="fake", address=address))
            shard = RunningShard(server, ToyBackend(), address, channel, stub)
            callers = Callers(shard, model, seed, leased=False)
            calling = asyncio.create_task(callers.run(tally))
            async with asyncio.timeout(HANGS_S):
                await tally.until_answered(callers.kinds if chance.random() > _EARLY_SHARE else set())
            requests = [asyncio.create_task(self._request(model, tally, kind)) for kind in _requests(model)]
            await asyncio.sleep(chance.uniform(0, _LONGEST_PAUSE_S))
            tally.has_begun_to_end, began = True, time.monotonic()
            try:
                async with asyncio.timeout(HANGS_S):
                    await ask()
                    while self._is_alive(pid):  # noqa: ASYNC110  it is no child of this process
                        await asyncio.sleep(0.01)
                    stopped.seconds = time.monotonic() - began
                    await asyncio.gather(calling, *requests)
            except TimeoutError:
                stopped.problems.append("it hangs")
                calling.cancel()
        stopped.ends = tally.ends
        stopped.problems += tally.problems
        if self._served.process.poll() is not None:
            stopped.problems.append(f"caravan serve has ended with {self._served.process.returncode}")

    async def _request(self, model: StoppedModel, tally: Tally, kind: tuple[str, dict[str, Any]]) -> None:
        path, body = kind
        try:
            async with self._session.post(path, json=body) as response:
                text = await response.text()
                end = "answered" if response.status == 200 else "problem"
        except aiohttp.ClientError as error:
            text, end = repr(error), "problem"
        tally.ends[path, end] += 1
        if end == "problem":
            tally.problems.append(f"{path} of {model.name}: {text[:300]}")

    async def _find_end(self, stopped: Stopped, words: str) -> None:
        """Find with which status the shard has ended in the server's log."""
        if stopped.problems:
            # It may not have ended at all.
            stopped.exit_name = "unknown"
            return
        lines: list[str] = []

        def is_there() -> bool:
            lines[:] = self._served.log[self._read :]
            return any(words in line and "exit=" in line for line in lines) or self._served.process.poll() is not None

        await eventually(is_there, "the server reports the end of a shard")
        self._read += len(lines)
        ends = [line.partition("exit=")[2].split()[0] for line in lines if words in line and "exit=" in line]
        stopped.exit_name = ends[0] if ends else "none"
        stopped.problems += faults_in("".join(lines))
        if stopped.exit_name != "0":
            stopped.problems.append(f"exit status {stopped.exit_name}")


def _command(pid: int) -> str:
    """Return the command line of a process, each word with a blank behind it; empty if it has ended."""
    return command_line(pid).replace("\0", " ")


def _requests(model: StoppedModel) -> list[tuple[str, dict[str, Any]]]:
    """Return requests to the server, each with its path."""
    named: dict[str, Any] = {"model": model.name}
    words = "the river of Paris is naïve, "
    found: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", named | {"input": [words[: 10 + number] for number in range(8)]}),
    ]
    if model.generates:
        found += [("/tokenize", named | {"inputs": words * (size // len(words))}) for size in _TEXTS]
        drawn = named | {"prompt": words, "max_tokens": 24, "temperature": 0}
        found += [("/v1/completions", drawn | {"ignore_eos": True})] * 2
        found.append(("/v1/completions", drawn | {"guided_regex": "[a-z ]{5,20}"}))
    return found
