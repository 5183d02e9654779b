"""A small server with both APIs on a real port, which can also misbehave."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class ToyServer:
    """Answers as ``mode`` says. ``most_running`` is the highest number of requests that ran at the same time."""

    mode: str = "good"
    step_s: float = 0.002
    running: int = 0
    most_running: int = 0
    bodies: list[dict[str, object]] = field(default_factory=list)
    url: str = ""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.mode == "429":
            return web.json_response({"error": "Model is overloaded"}, status=429)
        if self.mode == "422":
            return web.json_response({"error": "n is too large"}, status=422)
        if self.mode == "500":
            return web.json_response({"error": "no shard"}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await response.prepare(request)
            await self._stream(response, body)
        finally:
            self.running -= 1
        return response

    async def _stream(self, response: web.StreamResponse, body: dict[str, int]) -> None:
        tokens = body["max_tokens"] - (1 if self.mode == "short" else 0)
        choices = body.get("n", 1)
        for step in range(tokens):
            if step == 1 and self.mode == "hang":
                await asyncio.sleep(60)
            if step == 1 and self.mode == "error":
                await self._send(response, {"error": {"message": "the cache is full"}})
                return
            if step == 1 and self.mode == "cut":
                return
            if step == 1 and self.mode == "garbage":
                await response.write(b"data: {nonsense\n\n")
            await asyncio.sleep(self.step_s)
            for index in range(choices):
                await self._send(response, {"choices": [{"text": "x", "index": index, "finish_reason": None}]})
        usage = {
            "prompt_tokens": 7,
            "completion_tokens": tokens * choices,
            "total_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": 5},
        }
        await self._send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["parameters"]["max_new_tokens"]
        for step in range(count):
            details = {"generated_tokens": count, "input_length": 4} if step == count - 1 else None
            await self._send(response, {"token": {"id": step}, "details": details})
        return response

    @staticmethod
    async def _send(response: web.StreamResponse, event: dict[str, object]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
async def toy() -> AsyncIterator[ToyServer]:
    server = ToyServer()
    app = web.Application()
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/generate_stream", server.generate)
    # A hanging stream must not delay the end of a test.
    async with TestServer(app, handler_cancellation=True, shutdown_timeout=0.1) as running:
        server.url = str(running.make_url("")).rstrip("/")
        yield server
