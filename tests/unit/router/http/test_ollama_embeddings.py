"""Ollama's embeddings, with an engine whose vectors encode the length of a text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ANY_SENDER, TextSender
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import BOS, MODEL, FailingEmbedEngine, ScriptedEngine, length_vector

EMBED, OLDER = "/api/embed", "/api/embeddings"


async def ask(service: Service, path: str, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply(path, {"model": "any", **body})
    return reply


@pytest.mark.parametrize(("given", "lengths"), [("ab", [3]), (["ab", "c"], [3, 2]), ("", []), ([], []), (None, [])])
async def test_a_vector_for_each_text(service: Service, given: Any, lengths: list[int]) -> None:
    reply = await ask(service, EMBED, input=given, keep_alive="5m", options={"temperature": 0.5})
    assert reply.pop("total_duration") > 0
    assert reply == {
        "model": "scripted",
        "embeddings": [length_vector(length) for length in lengths],
        "load_duration": 0,
        "prompt_eval_count": sum(lengths),
    }
    assert not service.engine.streams


async def test_the_older_route_returns_one_vector(service: Service) -> None:
    assert await ask(service, OLDER, prompt="ab", keep_alive=0, options={}) == {"embedding": length_vector(3)}
    for nothing in ("", None):
        assert await ask(service, OLDER, prompt=nothing) == {"embedding": []}


class RecordingEngine(ScriptedEngine):
    """An engine that records the tokens of the texts; the first numbers of its vectors are not 0."""

    embedded: list[tuple[int, ...]]

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        self.embedded = list(texts)
        return [(0.5, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0) for _ in texts]


@pytest.mark.parametrize("truncate", [True, None])
@pytest.mark.parametrize(
    ("text", "options", "kept"),
    [
        ("ab" * 50, None, ("ab" * 50)[:63]),
        ("a" * 63, None, "a" * 63),
        ("abcdef", {"num_ctx": 3}, "ab"),
        ("abcdef", {"num_ctx": 256}, "abcdef"),
        ("a" * 20_000, None, "a" * 63),
        ("é" * 20_000, {"num_ctx": 1}, ""),
    ],
)
async def test_the_end_of_a_text_that_is_too_long_is_cut_off(truncate: Any, text: str, options: Any, kept: str) -> None:
    engine = RecordingEngine()
    async with serving(engine) as service:
        reply = await ask(service, EMBED, input=["x", text], truncate=truncate, options=options)
        expected = (BOS, *(100 + ord(letter) for letter in kept))
        assert engine.embedded[1] == expected
        assert reply["prompt_eval_count"] == len(expected) + len(engine.embedded[0])


@pytest.mark.parametrize("truncate", [None, True])
async def test_the_older_route_cuts_a_long_text_as_well(truncate: Any) -> None:
    engine = RecordingEngine()
    async with serving(engine) as service:
        await ask(service, OLDER, prompt="a" * 20_000, truncate=truncate)
        assert engine.embedded == [(BOS, *[100 + ord("a")] * 63)]


async def test_fewer_dimensions_are_scaled_to_length_one() -> None:
    async with serving(RecordingEngine()) as service:
        for dimensions, expected in [(1, [1.0]), (2, [math.sqrt(0.5)] * 2), (8, [0.5] * 4 + [0.0] * 4)]:
            [made] = (await ask(service, EMBED, input="a", dimensions=dimensions))["embeddings"]
            assert made == pytest.approx(expected)


RULES: list[tuple[str, dict[str, Any], str]] = [
    (EMBED, {"input": ["a", ""]}, "`input[1]` cannot be empty"),
    (EMBED, {"input": [["a"]]}, "Expected `str`, got `array` - at `$.input[0]`"),
    (EMBED, {"input": 5}, "Expected `str | array | null`, got `int` - at `$.input`"),
    (EMBED, {"input": ["a"] * 2049}, "Number of prompts exceeds the maximum allowed batch size of 2048. Given: 2049"),
    (EMBED, {"input": "a", "dimensions": 9}, "`dimensions` must be >= 1 and <= 8. Given: 9"),
    (EMBED, {"input": "a", "dimensions": 0}, "`dimensions` must be >= 1 and <= 8. Given: 0"),
    (OLDER, {"prompt": "a", "options": {"num_ctx": 0}}, "`options.num_ctx` must be strictly positive. Given: 0"),
    (EMBED, {"input": "a", "options": {"min_p": 2}}, "`options.min_p` must be >= 0.0 and <= 1.0. Given: 2.0"),
    (OLDER, {"prompt": "a", "options": {"typical_p": 2}}, "`options.typical_p` must be > 0.0 and <= 1.0. Given: 2.0"),
    (EMBED, {"input": "a", "options": {"top_p": 0}}, "`options.top_p` must be > 0.0 and <= 1.0. Given: 0.0"),
    (
        EMBED,
        {"input": "a", "options": {"repeat_penalty": 0}},
        "`options.repeat_penalty` must be >= 0.01 and <= 100.0. Given: 0.0",
    ),
    (
        EMBED,
        {"input": "a", "model": "pirate"},
        "`model` must not be an adapter: vectors are the model's own. Given: 'pirate'",
    ),
]


@pytest.mark.parametrize(("path", "fields", "message"), RULES)
async def test_invalid_requests_are_refused(service: Service, path: str, fields: dict[str, Any], message: str) -> None:
    response = await service.post(path, {"model": "any"} | fields)
    assert response.status == 400
    assert await response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}


@pytest.mark.parametrize("path", [EMBED, OLDER])
async def test_a_router_without_embeddings_names_the_flag(service: Service, path: str) -> None:
    service.engine.model = dataclasses.replace(MODEL, embedding_size=0, max_embed_tokens=0)
    response = await service.post(path, {"model": "any"})
    assert response.status == 400
    assert "--embeddings" in (await response.json())["error"]


async def test_a_request_needs_a_permit() -> None:
    async with serving(ScriptedEngine(), Limits(max_concurrent_requests=0)) as service:
        response = await service.post(EMBED, {"model": "any", "input": "a"})
        assert (response.status, response.headers["Retry-After"]) == (429, "1")


async def test_a_failure_is_reported() -> None:
    async with serving(FailingEmbedEngine()) as service:
        response = await service.post(EMBED, {"model": "any", "input": "a"})
        assert response.status == 424
        assert (await response.json())["error"] == "Request failed during generation: no room for 1"
