"""The page loses no word, whatever ends in the middle of an answer."""

import asyncio
import contextlib
import json
import os
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.programs import Program, address_of, kept_ports, program, url_of
from caravan_testing.serve_process import ROOT

pytestmark = [
    pytest.mark.clients,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium: apt-get install chromium"),
]

# Of each answer, as the browser's program asks for them.
LETTERS = 100
PYTHON = ROOT / ".cache/clients/page/bin/python"
SHARD = ("--backend=fake", "--fake-step-ms=30", "--ctx-size=8192")


class Wire:
    """A connection of the browser to the router that can be cut."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._open: set[asyncio.Task[None]] = set()
        # While it is cut: set when the browser has tried in vain.
        self._missed: asyncio.Event | None = None

    @contextlib.asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", port, reuse_address=True)
        try:
            yield
        finally:
            server.close()
            await self._close()

    async def fail(self) -> None:
        """Close what is open, and what is opened until the browser has noticed."""
        self._missed = asyncio.Event()
        await self._close()
        await self._missed.wait()
        self._missed = None

    async def _close(self) -> None:
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            if self._missed:
                self._missed.set()
            else:
                await self._pass_both_ways(reader, writer)
        self._open.discard(task)

    async def _pass_both_ways(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.closing(far_writer):
            ways = {
                asyncio.ensure_future(_pass(reader, far_writer)),
                asyncio.ensure_future(_pass(far_reader, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()


class Fleet:
    """A router with a store in a file, and two shards, each of which can be killed and comes back."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        # No request is to blame for a shard that the test kills, however often that is before its next token.
        patience = "--max-request-losses=20", "--shard-grace-s=600"
        self._router_flags = (f"--port={port}", f"--state-file={folder}/state", "--hostname=127.0.0.1", *patience)
        self._addresses = [f"unix:{folder}/{number}.sock" for number in range(2)]
        self._running: dict[str, tuple[Program, contextlib.AsyncExitStack]] = {}

    async def start(self, *names: str) -> None:
        for name in names or ("router", *self._addresses):
            stack = contextlib.AsyncExitStack()
            if name == "router":
                shards = [f"--shard={address}" for address in self._addresses]
                started = await stack.enter_async_context(
                    program("caravan_serve", "router", *self._router_flags, *shards)
                )
                await url_of(started)
            else:
                started = await stack.enter_async_context(program("caravan_shard", f"--address={name}", *SHARD))
                await address_of(started)
            self._running[name] = started, stack

    async def kill(self, *names: str) -> list[str]:
        """Kill programs, all without names, and return their names."""
        killed = list(names or self._running)
        for name in killed:
            _, stack = self._running.pop(name)
            await stack.aclose()
        return killed

    async def fail(self, kind: str, draw: random.Random) -> None:
        match kind:
            case "shard":
                names = await self.kill(draw.choice(self._addresses))
            case "router":
                names = await self.kill("router")
            case "amnesia":
                names = await self.kill("router")
                shutil.rmtree(self._folder / "state-files")
                for file in self._folder.glob("state*"):
                    file.unlink()
            case _:
                names = await self.kill()
        await self.start(*names)


@contextlib.asynccontextmanager
async def fleet(folder: Path, port: int) -> AsyncIterator[Fleet]:
    running = Fleet(folder, port)
    await running.start()
    try:
        yield running
    finally:
        await running.kill()


async def test_no_word_is_lost_at_twenty_points_of_answers(tmp_path: Path) -> None:
    seed = 44
    draw = random.Random(seed)
    with kept_ports(2) as (port, shown_port):
        wire = Wire(port)
        async with fleet(tmp_path, port) as servers, wire.listening(shown_port):

            async def fail(kind: str) -> None:
                await (wire.fail() if kind == "network" else servers.fail(kind, draw))

            found = await _read_answers(f"http://127.0.0.1:{shown_port}", seed, fail)
            texts, failures = await _stored(f"http://127.0.0.1:{port}", found["records"])
    for answer in found["answers"]:
        assert answer["asked"], answer
        assert answer["shown"].startswith(answer["seen"]), answer
        assert len(answer["shown"]) == LETTERS, answer
    # Whole, as the server has it where it still does, and in the browser's copy.
    answers = [record for record in found["records"] if record["kind"] == "answer"]
    ended = answers[:-2]
    assert [record for record in ended if record["status"] != "done"] == [], failures
    assert found["wrong"] == []
    for record in answers:
        assert texts.get(record["response"], record["text"]) == record["text"]
    shown = [record["text"].strip('"') for record in answers]
    assert {answer["shown"] for answer in found["answers"]} <= set(shown)
    forgotten = found["forgotten"]
    assert forgotten["kept"].startswith(forgotten["seen"])
    assert forgotten["went_on"].startswith(forgotten["kept"])
    assert forgotten["answers"] == 2


async def _read_answers(url: str, seed: int, fail: Any) -> dict[str, Any]:
    """Use the page and do what it asks for; return what it saw."""
    process = await asyncio.create_subprocess_exec(
        PYTHON,
        *("-m", "e2e.clients.page_outages", url, str(seed)),
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 24,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    async for line in process.stdout:
        if line.startswith(b"{"):
            found: dict[str, Any] = json.loads(line)
            break
        await fail(line.decode().strip())
        process.stdin.write(b"done\n")
    else:
        raise AssertionError("the browser's program has ended; its message is above")
    await process.wait()
    return found


async def _stored(url: str, records: list[dict[str, Any]]) -> tuple[dict[str, str], list[Any]]:
    """Return the texts of the responses that the server still has, by their ids, and why others failed."""
    texts, failures = {}, []
    async with ClientSession(url) as client:
        for record in records:
            async with client.get(f"/v1/responses/{record['response']}") as response:
                if response.status == 200:
                    whole = await response.json()
                    if whole["status"] == "failed":
                        failures.append(whole["error"])
                    texts[record["response"]] = "".join(
                        part["text"] for item in whole["output"] for part in item.get("content", ())
                    )
    return texts, failures
