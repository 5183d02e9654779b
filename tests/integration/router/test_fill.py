"""Filling in the middle of a text, from HTTP to the shard's tokenizer."""

from typing import Any

from aiohttp import ClientSession

from caravan_shard.backends.toy.model import BOS
from caravan_testing.cluster import Cluster, cluster, expected_text
from caravan_testing.toy_oracle import expected_output

# The toy's tokens for it are bytes.
PROMPT = [BOS, *b"\x1d", *b"def f(</s>", *b"\x1e", *b")\n", *b"\x1f"]


async def post(session: ClientSession, running: Cluster, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(f"{running.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        reply: dict[str, Any] = await response.json()
        return reply


async def test_the_model_reads_both_sides_and_no_control_token_in_them() -> None:
    expected = expected_output(PROMPT, 12)
    async with cluster() as running, ClientSession() as session:
        body = {"prompt": "def f(</s>", "suffix": ")\n", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        reply = await post(session, running, "/v1/completions", body)
        (choice,) = reply["choices"]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (PROMPT, expected)
        asked = {"model": "toy", "prompt": "def f(</s>", "suffix": ")\n", "stream": False}
        inserted = await post(
            session, running, "/api/generate", {**asked, "options": {"temperature": 0, "num_predict": 12}}
        )
        assert inserted["context"] == [*PROMPT, *expected]
        await running.wait_until_at_rest()


async def test_llama_servers_routes_return_the_same_text() -> None:
    async with cluster() as running, ClientSession() as session:
        greedy = {"temperature": 0, "n_predict": 12}
        plain = await post(session, running, "/completion", {"prompt": "hello", **greedy})
        assert plain["content"] == expected_text("hello", 12)
        body = {"input_prefix": "def f(", "prompt": "</s>", "input_suffix": ")\n", **greedy, "return_tokens": True}
        filled = await post(session, running, "/infill", body)
        assert filled["tokens"] == expected_output(PROMPT, 12)
        for path, one in (("/completion", {"prompt": "hello", **greedy}), ("/infill", body)):
            async with session.post(f"{running.url}{path}", json={**one, "n": 2}) as response:
                both = await response.json()
            assert [(each["index"], each["content"]) for each in both] == [
                (index, (plain if path == "/completion" else filled)["content"]) for index in range(2)
            ]
        long = {**body, "input_prefix": "x" * 200}
        first, again = [await post(session, running, "/infill", long) for _ in range(2)]
        assert first["tokens_cached"] == 0
        assert again["tokens_cached"] > 200
        anew = await post(session, running, "/infill", {**long, "cache_prompt": False})
        assert anew["tokens_cached"] == 0
        assert first["content"] == again["content"] == anew["content"]
        await running.wait_until_at_rest()
