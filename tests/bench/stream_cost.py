"""Measures the CPU time of the router's process for one streamed token. Not run by the test suite.

``python tests/bench/stream_cost.py``: each stream gets a token every ``STEP_S`` seconds. The path measured goes from
the engine's token streams to a socket that another process reads, without the engine's own part (steps, gRPC).

With ``--cold`` the processor's caches are emptied before each step, as the weights of a model empty them in a forward
pass. This time is not counted. Most of the cost then is that of code and data that is used for the first time in a
step, so that one stream costs more than a thirty-second of 32.
"""

import argparse
import asyncio
import logging
import multiprocessing
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_router.engine.streams import RequestStream
from caravan_router.http.app import build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.generation import GenerationSpec, GenerationState, Standing
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.core.trace import NO_TRACE, GenerationTrace
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

STEP_S = 0.002
# Larger than the caches of one core, in bytes.
SWEPT_BYTES = 48 << 20
CACHE_LINE_BYTES = 64
STOPS = ["\n\nUser:", "</s>"]
STOPS = ["\n\nUser:", "</s>"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many streams get how many tokens, and whether the caches are emptied before each."""

    streams: int
    tokens: int
    cold: bool


def requests(tokens: int) -> dict[str, object]:
    """Return request bodies by path, with what tells them apart."""
    generate = {"max_new_tokens": tokens}
    complete = {"prompt": "x", "stream": True, "max_tokens": tokens}
    chat = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": tokens}
    return {
        "/generate_stream": {"inputs": "x", "parameters": generate},
        "/generate_stream, 2 stop strings": {"inputs": "x", "parameters": generate | {"stop": STOPS}},
        "/v1/completions": complete,
        "/v1/completions, 2 stop strings": complete | {"stop": STOPS},
        "/v1/chat/completions": chat,
    }


class SteppedEngine(ScriptedEngine):
    """Gives every stream a token in each step, as the batch of one shard does."""

    def __init__(self, load: Load) -> None:
        super().__init__(model=replace(CHAT_MODEL, max_sequence_tokens=2 * load.tokens))
        self._load = load
        self.real_streams: list[RequestStream] = []

    def submit(  # type: ignore[override]  # a real stream in place of a scripted one
        self, spec: GenerationSpec, trace: GenerationTrace = NO_TRACE
    ) -> RequestStream:
        stream = RequestStream(lambda: None, lambda: Standing(GenerationState.RUNNING), trace)
        self.real_streams.append(stream)
        return stream

    async def run(self) -> float:
        """Return the seconds of CPU time that this process uses until all streams have got all tokens."""
        swept = np.zeros(SWEPT_BYTES, np.uint8)
        used_s = 0.0
        for number in range(self._load.tokens):
            if self._load.cold:
                swept[::CACHE_LINE_BYTES] += 1
            began = time.process_time()
            finish = FinishReason.LENGTH if number == self._load.tokens - 1 else None
            token = GeneratedToken(1234, b" word", False, -1.25, (), finish)
            for stream in self.real_streams:
                stream.deliver((), (token,))
            await asyncio.sleep(STEP_S)
            used_s += time.process_time() - began
        return used_s


def read_all(port: int, path: str, body: bytes, streams: int) -> None:
    """Read all streams and forget what they say; runs in another process."""

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while await reader.read(65536):
            pass
        writer.close()

    async def read_streams() -> None:
        await asyncio.gather(*(read_one() for _ in range(streams)))

    uvloop.run(read_streams())


async def measure(path: str, body: bytes, load: Load) -> float:
    """Return the microseconds of CPU time per token."""
    engine = SteppedEngine(load)
    limits = Limits()
    async with listening(build_app(engine, limits, Metrics()), limits, Listen()) as port:
        given = (int(port.url.rpartition(":")[2]), path, body, load.streams)
        reader = multiprocessing.get_context("spawn").Process(target=read_all, args=given, daemon=True)
        reader.start()
        while len(engine.real_streams) < load.streams:  # noqa: ASYNC110 - the engine sets no event
            await asyncio.sleep(0.01)
        used_s = await engine.run()
        await asyncio.to_thread(reader.join)
    return used_s / (load.streams * load.tokens) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--cold", action="store_true")
    given = parser.parse_args()
    load = Load(streams=given.streams, tokens=given.tokens, cold=given.cold)
    logging.disable()
    for name, request in requests(load.tokens).items():
        cost = uvloop.run(measure(name.partition(",")[0], msgspec.json.encode(request), load))
        sys.stdout.write(f"{name}: {cost:.1f} us a token\n")


if __name__ == "__main__":
    main()
