"""Compares the ways to run a loop of tool calls on one server: `PYTHONPATH=tests python -m bench.tool_loops`.

A loop is an agent whose tool answers at once: a task, then as many calls as `--turns` says, one in each response. The
same texts go over HTTP with the whole history, over HTTP with `previous_response_id`, over a WebSocket for each loop,
and over lanes of one WebSocket. The ways take turns, and each has a part of the cache of its own. Calls have the same
number of tokens in all ways, by their schema. Writes a table in Markdown, in about a quarter of an hour.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from aiohttp import ClientSession, ClientTimeout, ClientWebSocketResponse

from bench.contenders import Common, Contender, Product
from bench.paths import DEMO_MODEL, BenchError, describe, pinned_version
from bench.servers import Running, serving
from caravan_serve.bench.client_sse import SseParser
from caravan_serve.bench.runner import cpu_seconds
from caravan_serve.bench.statistics import percentile
from caravan_serve.bench.workloads import seeded, words

Json: TypeAlias = dict[str, Any]
Told: TypeAlias = AsyncIterator[Json]

# A loop of twenty turns fits into the cells of one sequence, so that the layout stays split.
_SLOTS, _CELLS = 8, 32_768
_INSTRUCTION_WORDS, _TASK_WORDS, _RESULT_WORDS = 150, 30, 100
_WARM_UP_TURNS = 3
_TIMEOUT_S = 600
_COMPLETED = "response.completed"
_ENDS = {_COMPLETED, "response.failed", "response.incomplete", "error"}
# About 32 tokens, most of which are chosen by the model.
_LINES = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 3, "maxItems": 3}
_TOOL = {
    "type": "function",
    "name": "read_lines",
    "description": "Reads lines of the file.",
    "parameters": {
        "type": "object",
        "properties": {"lines": _LINES},
        "required": ["lines"],
        "additionalProperties": False,
    },
}
_COMMON: Json = {
    "model": "default",
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "name": _TOOL["name"]},
    "parallel_tool_calls": False,
    "temperature": 0,
}


class Way(Enum):
    """How a loop sends its requests."""

    HISTORY = "HTTP, whole history"
    CHAINED = "HTTP, chained ids"
    SOCKETS = "WebSocket for each loop"
    LANES = "lanes of one WebSocket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """``ttft_s``: from the first byte of the body to the first event of the call. ``sent``: the bytes of the body."""

    ttft_s: float
    sent: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Loop:
    """What one loop took, from its first request to its last call."""

    seconds: float = 0.0
    turns: list[Turn] = field(default_factory=list)


@dataclass(slots=True)
class Got:
    """Of one way and number of loops: the loops of all rounds, and the router's processor time a turn in each round."""

    loops: list[Loop] = field(default_factory=list)
    router_s: list[float] = field(default_factory=list)


# Sends a body and returns its size and the events of the answer.
Send: TypeAlias = Callable[[Json], Awaitable[tuple[int, Told]]]


class Http:
    """Sends each request with POST, on a connection that stays open."""

    def __init__(self, session: ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/v1/responses"

    async def send(self, body: Json) -> tuple[int, Told]:
        """Send ``body``."""
        data = json.dumps(body | {"stream": True}).encode()
        return len(data), self._told(data)

    async def _told(self, data: bytes) -> Told:
        parser = SseParser()
        async with self._session.post(self._url, data=data, headers={"Content-Type": "application/json"}) as response:
            if response.status != 200:
                raise BenchError(f"the server answered {response.status}: {(await response.text())[:300]}")
            async for chunk in response.content.iter_any():
                for event in parser.feed(chunk):
                    yield json.loads(event)


class Socket:
    """A WebSocket connection. Events go to the lane that they name, or to the only one."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket = socket
        self._lanes: dict[str | None, asyncio.Queue[Json]] = {}

    async def read(self) -> None:
        """Pass events on until the connection ends, which all lanes are told."""
        async for message in self._socket:
            event = json.loads(message.data)
            self._lanes[event.get("stream_id")].put_nowait(event)
        for events in self._lanes.values():
            events.put_nowait({"type": "error", "error": "the connection has ended"})

    def lane(self, name: str | None) -> Send:
        """Return what sends the requests of one loop."""
        events = self._lanes[name] = asyncio.Queue()
        named = {} if name is None else {"stream_id": name}

        async def told() -> Told:
            kind = ""
            while kind not in _ENDS:
                event = await events.get()
                kind = event["type"]
                yield event

        async def send(body: Json) -> tuple[int, Told]:
            data = json.dumps({"type": "response.create"} | body | named)
            await self._socket.send_str(data)
            return len(data.encode()), told()

        return send


@asynccontextmanager
async def connected(session: ClientSession, url: str) -> AsyncIterator[Socket]:
    """Open a connection and read from it until the block ends."""
    async with session.ws_connect(f"{url}/v1/responses", max_msg_size=0) as opened:
        socket = Socket(opened)
        reading = asyncio.create_task(socket.read())
        try:
            yield socket
        finally:
            reading.cancel()
            await asyncio.wait({reading})


async def senders(way: Way, loops: int, session: ClientSession, url: str, stack: AsyncExitStack) -> list[Send]:
    """Return what sends the requests of each loop; what it opens is closed with ``stack``."""
    match way:
        case Way.HISTORY | Way.CHAINED:
            return [Http(session, url).send] * loops
        case Way.SOCKETS:
            opened = [await stack.enter_async_context(connected(session, url)) for _ in range(loops)]
            return [one.lane(None) for one in opened]
        case Way.LANES:
            shared = await stack.enter_async_context(connected(session, url))
            return [shared.lane(f"lane-{number}") for number in range(loops)]


async def run_loop(way: Way, send: Send, seed: str, turns: int, salt: str) -> Loop:
    """Run one loop. The texts follow from ``seed``, and ``salt`` names the part of the cache."""
    rng = seeded(seed)
    common = _COMMON | {"instructions": words(rng, _INSTRUCTION_WORDS), "cache_salt": salt}
    # Who sends the whole history needs nothing to be kept.
    common |= {"store": False} if way is Way.HISTORY else {}
    new: list[Json] = [{"role": "user", "content": words(rng, _TASK_WORDS)}]
    history, before, loop = list(new), "", Loop()
    began = time.perf_counter()
    for _ in range(turns):
        if way is Way.HISTORY:
            body = common | {"input": history}
        else:
            body = common | {"input": new} | ({"previous_response_id": before} if before else {})
        turn, response = await _ask(send, body)
        loop.turns.append(turn)
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        new = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": words(rng, _RESULT_WORDS)}
            for call in calls
        ]
        history += [*response["output"], *new]
        before = response["id"]
    loop.seconds = time.perf_counter() - began
    return loop


async def _ask(send: Send, body: Json) -> tuple[Turn, Json]:
    """Return the figures of a request, and its whole response. Raises BenchError if it does not complete."""
    began, first_s, last = time.perf_counter(), 0.0, Json()
    sent, events = await send(body)
    async for last in events:
        if not first_s and (last["type"] == "response.output_item.added" or last["type"].endswith(".delta")):
            first_s = time.perf_counter() - began
    if last.get("type") != _COMPLETED:
        said = last.get("response", last)
        raise BenchError(f"a response did not complete: {said.get('error') or said.get('incomplete_details')}")
    response, usage = last["response"], last["response"]["usage"]
    turn = Turn(
        ttft_s=first_s,
        sent=sent,
        prompt_tokens=usage["input_tokens"],
        cached_tokens=usage["input_tokens_details"]["cached_tokens"],
        output_tokens=usage["output_tokens"],
    )
    return turn, response


async def run_loops(way: Way, loops: int, url: str, seed: int, turns: int) -> list[Loop]:
    """Run ``loops`` at the same time."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(ClientSession(timeout=ClientTimeout(_TIMEOUT_S)))
        sends = await senders(way, loops, session, url, stack)
        salt = f"{list(Way).index(way)} {loops} {seed} {turns}"
        return await asyncio.gather(
            *(run_loop(way, send, f"{seed} {number}", turns, salt) for number, send in enumerate(sends))
        )


Found: TypeAlias = dict[tuple[int, Way], Got]


def measure(running: Running, loops: Sequence[int], rounds: int, turns: int) -> Found:
    """Run all ways in turn, every other round backwards, after a short round that does not count."""
    found: Found = {(count, way): Got() for count in loops for way in Way if count > 1 or way is not Way.LANES}
    for count, way in found:
        asyncio.run(run_loops(way, count, running.url, 0, _WARM_UP_TURNS))
    for seed in range(1, rounds + 1):
        for count, way in list(found) if seed % 2 else list(found)[::-1]:
            began_s = cpu_seconds(running.router_pids())
            done = asyncio.run(run_loops(way, count, running.url, seed, turns))
            found[count, way].loops += done
            found[count, way].router_s.append((cpu_seconds(running.router_pids()) - began_s) / (count * turns))
            print(f"round {seed}, {count}, {way.value}: {mean(one.seconds for one in done):.1f} s", flush=True)
    return found


def table(found: Mapping[tuple[int, Way], Got]) -> str:
    """Return the medians as a table in Markdown."""
    head = ("loops", "way", "a loop, s", "TTFT p50, ms", "p99", "sent, kB", "computed", "cached", "router CPU, ms")
    rows = [head, ("---:", "---", *["---:"] * (len(head) - 2))]
    for (count, way), got in found.items():
        returns = sorted(turn.ttft_s for loop in got.loops for turn in loop.turns[1:])
        prompt = [sum(turn.prompt_tokens for turn in loop.turns) for loop in got.loops]
        cached = [sum(turn.cached_tokens for turn in loop.turns) for loop in got.loops]
        rows.append(
            (
                str(count),
                way.value,
                f"{median(loop.seconds for loop in got.loops):.1f}",
                f"{1e3 * percentile(returns, 0.5):.0f}",
                f"{1e3 * percentile(returns, 0.99):.0f}",
                f"{median(sum(turn.sent for turn in loop.turns) for loop in got.loops) / 1e3:.0f}",
                f"{median(prompt) - median(cached):,.0f}",
                f"{median(cached):,.0f}",
                f"{1e3 * median(got.router_s):.1f}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--loops", type=int, nargs="+", default=[1, 4], help="how many run at the same time")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", "--threads", type=int, default=2)
    given = parser.parse_args()
    # The default action would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{describe()}, {given.threads} threads, {given.model.name}, llama-cpp-python {pinned_version()}")
    with tempfile.TemporaryDirectory() as folder:
        # Responses are in a file, as with an operator who wants to keep them.
        stored = ("--state-file", f"{folder}/state.db")
        ours = Contender(name="tool-loops", product=Product.CARAVAN, slots=_SLOTS, cells=_CELLS, flags=stored)
        with serving(ours, Common(model=given.model, threads=given.threads)) as running:
            found = measure(running, given.loops, given.rounds, given.turns)
    tokens = {turn.output_tokens for got in found.values() for loop in got.loops for turn in loop.turns}
    print(f"each call has {min(tokens)} to {max(tokens)} tokens\n\n{table(found)}")


if __name__ == "__main__":
    main()
