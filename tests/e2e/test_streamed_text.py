"""The joined text of a stream equals the text of the same request without streaming.

Seeded requests with stop strings, at temperatures that give tokens which split characters.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.http_server import events
from caravan_testing.raw_http import splitting
from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched

pytestmark = [pytest.mark.e2e, pytest.mark.model]

REQUESTS, SHARDS, TOKENS = 80, 2, 6
PROMPTS = ("🙂🙃 🇫🇷", "Cafe\u0301 Zoë e\u0301", "日本語の", "The cat sat on the", "👩\u200d👩\u200d👧 emoji:")
STOPS = (["e"], ["the", " a"], ["\n", ". "], ["é", "�", "I"], [" t", "s "])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two shards that compute the same bits."""
    with serve(
        "--shards", str(SHARDS), "-np", "1", "-c", "512", "-t", "1", "--exact", models=(fetched(WORDS_MODEL),)
    ) as running:
        yield running


@dataclass(frozen=True)
class Request:
    path: str
    body: dict[str, Any]
    stream_path: str

    def text_of(self, reply: dict[str, Any]) -> str:
        if "generated_text" in reply:
            return str(reply["generated_text"])
        (choice,) = reply["choices"]
        return str(choice["text"] if "text" in choice else choice["message"]["content"] or "")


def request_of(number: int) -> Request:
    chance = random.Random(number)
    prompt, stops = chance.choice(PROMPTS), chance.choice(STOPS)
    temperature = chance.choice((0.8, 1.5, 3.0))
    # With a salt of its own, each request computes its whole prompt, so that all round alike.
    salt = {"cache_salt": f"{number}"}
    if number % 4 < 2:
        parameters = {"max_new_tokens": TOKENS, "stop": stops, "temperature": temperature, "seed": number}
        return Request("/generate", salt | {"inputs": prompt, "parameters": parameters}, "/generate_stream")
    body = salt | {"max_tokens": TOKENS, "stop": stops, "temperature": temperature, "seed": number}
    if number % 4 == 2:
        return Request("/v1/completions", body | {"prompt": prompt}, "/v1/completions")
    path = "/v1/chat/completions"
    return Request(path, body | {"messages": [{"role": "user", "content": prompt}]}, path)


def again(request: Request) -> Request:
    return replace(request, body=request.body | {"cache_salt": f"{request.body['cache_salt']} again"})


async def whole(session: ClientSession, url: str, request: Request) -> str:
    async with session.post(f"{url}{request.path}", json=request.body) as response:
        reply = await response.json()
        assert response.status == 200, reply
        return request.text_of(reply)


async def streamed(session: ClientSession, url: str, request: Request) -> str:
    body = request.body if request.stream_path.endswith("_stream") else request.body | {"stream": True}
    async with session.post(f"{url}{request.stream_path}", json=body) as response:
        assert response.status == 200
        chunks = [chunk for chunk in events((await response.read()).decode()) if chunk != "[DONE]"]
    if "token" in chunks[0]:
        # Events show the text of control tokens, which is not part of the generated text.
        text = "".join(chunk["token"]["text"] for chunk in chunks if not chunk["token"]["special"])
        assert text == chunks[-1]["generated_text"]
        return text
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


async def test_streamed_text_equals_whole_text(served: Served) -> None:
    gate = asyncio.Semaphore(SHARDS)
    texts: list[str] = []
    async with ClientSession() as session, splitting(served.url, 9) as split_url:

        async def compare(request: Request) -> None:
            async with gate:
                expected = await whole(session, served.url, request)
                texts.append(expected)
                assert await streamed(session, split_url, again(request)) == expected, request

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(compare(request_of(number)))
    # Check that the texts differ enough to be worth comparing.
    assert len({text for text in texts if text}) > REQUESTS / 2
    assert any(not text.isascii() for text in texts)
