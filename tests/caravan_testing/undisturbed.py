"""Streams that run beside what a test does to a server, and must not notice it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession

from caravan_testing.http_server import events
from caravan_testing.waiting import eventually

# Prompts whose greedy outputs by the demo model have no near ties: the best token leads by more than 0.5 in logprob,
# while others in the batch change logprobs by some thousandths.
PROMPTS = ("21 22 23 24 25", "31, 32, 33, 34,", "100 101 102 103 104", "1000 1001 1002")
TOKENS = 40


async def _streamed(session: ClientSession, url: str, prompt: str) -> str:
    """Return the text of a greedy stream."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        chunks = events(await response.text())
    assert chunks.pop() == "[DONE]"
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@asynccontextmanager
async def undisturbed(url: str) -> AsyncIterator[None]:
    """Run streams again and again during the block; each text must be the one it is without any disturbance."""
    ended: list[str] = []
    async with ClientSession() as session:
        calm = {prompt: await _streamed(session, url, prompt) for prompt in PROMPTS}

        async def run(prompt: str) -> None:
            while True:
                assert await _streamed(session, url, prompt) == calm[prompt]
                ended.append(prompt)

        running = [asyncio.create_task(run(prompt)) for prompt in PROMPTS]
        try:
            yield
            before = len(ended)
            # Wait for the streams that were disturbed last, so that they are checked too.
            await eventually(
                lambda: len(ended),
                "the streams that were disturbed end",
                lambda found: found >= before + len(PROMPTS) or any(task.done() for task in running),
            )
        finally:
            for task in running:
                task.cancel()
            done = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in done), done
