"""Measures the CPU time of the router's process for one streamed token. Not run by the test suite.

``python tests/bench/stream_cost.py``: each of 32 streams gets a token every ``STEP_S`` seconds. The path measured goes
from the engine's token streams to a socket that another process reads, without the engine's own part (steps, gRPC).
"""

import asyncio
import logging
import multiprocessing
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from caravan_router.core.generation import GenerationSpec, GenerationState
from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import GeneratedToken
from caravan_router.engine.streams import RequestStream
from caravan_router.http.app import build_app
from caravan_router.http.limits import Limits
from caravan_router.http.server.listener import Listen, listening
from caravan_router.metrics.recorder import Metrics
from caravan_testing.scripted_engine import MODEL, ScriptedEngine

STREAMS, TOKENS, STEP_S = 32, 2000, 0.002
STOPS = ["\n\nUser:", "</s>"]
REQUESTS = {
    "/generate_stream": {"inputs": "x", "parameters": {"max_new_tokens": TOKENS}},
    "/generate_stream, 2 stop strings": {"inputs": "x", "parameters": {"max_new_tokens": TOKENS, "stop": STOPS}},
    "/v1/completions": {"prompt": "x", "stream": True, "max_tokens": TOKENS},
    "/v1/completions, 2 stop strings": {"prompt": "x", "stream": True, "max_tokens": TOKENS, "stop": STOPS},
}


class SteppedEngine(ScriptedEngine):
    """Gives every stream a token in each step, as the batch of one shard does."""

    def __init__(self) -> None:
        super().__init__(model=replace(MODEL, max_sequence_tokens=2 * TOKENS))
        self.real_streams: list[RequestStream] = []

    def submit(self, spec: GenerationSpec) -> RequestStream:  # type: ignore[override]
        stream = RequestStream(lambda: None, lambda: GenerationState.RUNNING)
        self.real_streams.append(stream)
        return stream

    async def run(self) -> float:
        """Return the seconds of CPU time that this process uses until all streams have got all tokens."""
        began = time.process_time()
        for number in range(TOKENS):
            finish = FinishReason.LENGTH if number == TOKENS - 1 else None
            token = GeneratedToken(1234, b" word", False, -1.25, (), finish)
            for stream in self.real_streams:
                stream.deliver((), (token,))
            await asyncio.sleep(STEP_S)
        await asyncio.sleep(0.2)
        return time.process_time() - began


def read_all(port: int, path: str, body: bytes) -> None:
    """Read all streams and forget what they say; runs in another process."""

    async def read_one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while await reader.read(65536):
            pass
        writer.close()

    async def read_streams() -> None:
        await asyncio.gather(*(read_one() for _ in range(STREAMS)))

    uvloop.run(read_streams())


async def measure(path: str, body: bytes) -> float:
    """Return the microseconds of CPU time per token."""
    engine = SteppedEngine()
    limits = Limits()
    async with listening(build_app(engine, limits, Metrics()), limits, Listen()) as url:
        port = int(url.rpartition(":")[2])
        reader = multiprocessing.get_context("spawn").Process(target=read_all, args=(port, path, body), daemon=True)
        reader.start()
        while len(engine.real_streams) < STREAMS:  # noqa: ASYNC110 - the engine sets no event
            await asyncio.sleep(0.01)
        used_s = await engine.run()
        await asyncio.to_thread(reader.join)
    return used_s / (STREAMS * TOKENS) * 1e6


if __name__ == "__main__":
    logging.disable()
    for name, request in REQUESTS.items():
        cost = uvloop.run(measure(name.partition(",")[0], msgspec.json.encode(request)))
        sys.stdout.write(f"{name}: {cost:.1f} us a token\n")
