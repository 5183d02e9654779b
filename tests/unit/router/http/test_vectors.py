"""Embeddings, scores and ranks, over HTTP."""

import asyncio
import base64
import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ANY_SENDER, TextSender
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import MODEL, FailingEmbedEngine, ScriptedEngine, length_vector
from caravan_testing.waiting import eventually


async def embed(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/embeddings", {"model": "any", **body})
    return reply


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("ab", [3]),
        (["ab", "c"], [3, 2]),
        ([5, 6, 7, 8], [4]),
        ([[5], [6, 7]], [1, 2]),
    ],
)
async def test_a_vector_for_each_text(service: Service, given: Any, lengths: list[int]) -> None:
    reply = await embed(service, input=given, user="me", encoding_format="float", dimensions=8)
    assert reply == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": length_vector(length)}
            for index, length in enumerate(lengths)
        ],
        "model": "scripted",
        "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
    }


async def test_base64_is_little_endian_float32(service: Service) -> None:
    [one] = (await embed(service, input="ab", encoding_format="base64"))["data"]
    assert list(struct.unpack("<8f", base64.b64decode(one["embedding"]))) == length_vector(3)


async def test_openais_client(service: Service) -> None:
    def ask() -> openai.types.CreateEmbeddingResponse:
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            return client.embeddings.create(model="any", input=["ab", "c"])

    reply = await asyncio.to_thread(ask)
    assert [one.embedding for one in reply.data] == [length_vector(3), length_vector(2)]
    assert reply.usage.total_tokens == 5


RULES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": ""}, "input", "`input` cannot be empty"),
    ({"input": []}, "input", "`input` cannot be empty"),
    ({"input": [[]]}, "input", "`input` cannot be empty"),
    ({"input": ["a", ""]}, "input[1]", "`input[1]` cannot be empty"),
    (
        {"input": ["a", 5]},
        "input",
        "`input` must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
    ({"input": [1000]}, "input", "`input` token ids must be >= 0 and < 1000. Given: 1000"),
    ({"input": [[5], [-1]]}, "input[1]", "`input[1]` token ids must be >= 0 and < 1000. Given: -1"),
    ({"input": ["a"] * 2049}, "input", "Number of prompts exceeds the maximum allowed batch size of 2048. Given: 2049"),
    ({"dimensions": 4}, "dimensions", "`dimensions` must be 8, the length of the model's vectors. Given: 4"),
    ({"dimensions": 0}, "dimensions", "`dimensions` must be 8, the length of the model's vectors. Given: 0"),
    ({"encoding_format": "int8"}, "encoding_format", "Invalid enum value 'int8' - at `$.encoding_format`"),
    ({"model": "pirate"}, "model", "`model` must not be an adapter: vectors are the model's own. Given: 'pirate'"),
]


@pytest.mark.parametrize(("fields", "param", "message"), RULES)
async def test_invalid_requests_are_refused(
    service: Service, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = await service.post("/v1/embeddings", {"input": "a"} | fields)
    assert response.status == 400
    assert await response.json() == {
        "error": {
            "message": f"Input validation error: {message}",
            "type": "invalid_request_error",
            "param": param,
            "code": "validation",
        }
    }


async def test_a_router_without_embeddings_names_the_flag(service: Service) -> None:
    service.engine.model = dataclasses.replace(MODEL, embedding_size=0, max_embed_tokens=0)
    response = await service.post("/v1/embeddings", {"input": "a"})
    assert response.status == 400
    assert "--embeddings" in (await response.json())["error"]["message"]


@dataclass
class WaitingEngine(ScriptedEngine):
    """An engine that returns vectors once ``resume`` is set."""

    async def embed(self, texts: Sequence[tuple[int, ...]], sender: TextSender = ANY_SENDER) -> list[tuple[float, ...]]:
        await self.resume.wait()
        return await super().embed(texts, sender)


async def test_a_request_holds_a_permit_and_does_not_count_as_a_generation() -> None:
    engine = WaitingEngine()
    async with serving(engine, Limits(max_concurrent_requests=1)) as service:
        first = asyncio.create_task(service.post("/v1/embeddings", {"input": "a"}))
        await eventually(lambda: service.free_permits == 0)
        refused = await service.post("/v1/embeddings", {"input": "a"})
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        engine.resume.set()
        assert (await first).status == 200
        assert service.is_idle()
        assert await service.sample("tgi_request_count") == 0


async def test_a_client_that_leaves_gives_its_permit_back() -> None:
    async with serving(WaitingEngine()) as service:
        task = asyncio.create_task(service.post("/v1/embeddings", {"input": "a"}))
        await eventually(lambda: not service.is_idle())
        task.cancel()
        await eventually(service.is_idle)


async def test_a_failure_is_reported() -> None:
    async with serving(FailingEmbedEngine()) as service:
        response = await service.post("/v1/embeddings", {"input": "a"})
        assert response.status == 424
        assert (await response.json())["error"]["message"] == "Request failed during generation: no room for 1"


def cosine(one: str, other: str) -> float:
    # A token begins each text.
    first, second = length_vector(len(one) + 1), length_vector(len(other) + 1)
    return sum(a * b for a, b in zip(first, second, strict=True))


async def score(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/score", {"model": "any", **body})
    return reply


async def rerank(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/rerank", {"model": "any", **body})
    return reply


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [
        ("ab", "c", [("ab", "c")]),
        ("ab", ["c", "defg"], [("ab", "c"), ("ab", "defg")]),
        (["c", "defg"], ["ab"], [("c", "ab"), ("defg", "ab")]),
        (["c", "ab"], ["ab", "defg"], [("c", "ab"), ("ab", "defg")]),
    ],
)
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
async def test_each_pair_has_the_cosine_of_its_vectors(
    service: Service, first: Any, second: Any, pairs: list[tuple[str, str]], names: tuple[str, str]
) -> None:
    reply = await score(service, **{names[0]: first, names[1]: second}, user="me")
    tokens = sum(len(text) + 1 for text in {text for pair in pairs for text in pair})
    assert reply.pop("id").startswith("score-")
    assert reply.pop("created") > 0
    assert [one.pop("score") for one in reply["data"]] == pytest.approx([cosine(*pair) for pair in pairs])
    assert reply == {
        "object": "list",
        "model": "scripted",
        "data": [{"index": index, "object": "score"} for index in range(len(pairs))],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


async def test_equal_texts_score_one(service: Service) -> None:
    [one] = (await score(service, text_1="abc", text_2="abc"))["data"]
    assert one["score"] == pytest.approx(1.0)


async def test_documents_are_ranked_by_their_score(service: Service) -> None:
    documents = ["a", "abcdef", "abc", "ab"]
    reply = await rerank(service, query="abc", documents=documents)
    expected = sorted(range(4), key=lambda index: -cosine("abc", documents[index]))
    assert [one["index"] for one in reply["results"]] == expected
    assert reply["results"][0]["index"] == 2
    for one in reply["results"]:
        assert one["document"] == {"text": documents[one["index"]]}
        assert one["relevance_score"] == pytest.approx(cosine("abc", documents[one["index"]]))
    assert reply["model"] == "scripted"
    assert reply["usage"]["total_tokens"] == 2 + 7 + 4 + 3


async def test_jinas_fields(service: Service) -> None:
    body = {"query": "abc", "documents": [{"text": "a"}, {"text": "abc"}, "ab"], "return_documents": False}
    reply = await rerank(service, **body, top_n=1)
    assert [one["index"] for one in reply["results"]] == [1]
    assert "document" not in reply["results"][0]
    assert len((await rerank(service, **body, top_n=0))["results"]) == 3


SCORE_RULES: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/v1/score", {"text_1": "a"}, "text_2", "`text_2` is missing"),
    ("/v1/score", {"text_2": "a"}, "text_1", "`text_1` is missing"),
    ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1", "`text_1` cannot be empty"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "`text_2[1]` cannot be empty"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "`query` cannot be empty"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents", "`documents` cannot be empty"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["a"] * 2049},
        "documents",
        "Number of prompts exceeds the maximum allowed batch size of 2048. Given: 2049",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["a"], "top_n": -1},
        "top_n",
        "`top_n` must be >= 0 and <= 2147483647. Given: -1",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["a"], "model": "pirate"},
        "model",
        "`model` must not be an adapter: vectors are the model's own. Given: 'pirate'",
    ),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), SCORE_RULES)
async def test_invalid_requests_for_scores_are_refused(
    service: Service, path: str, body: dict[str, Any], param: str | None, message: str
) -> None:
    response = await service.post(path, body)
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["param"], error["message"]) == (param, f"Input validation error: {message}")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/score", {"text_1": "a", "text_2": "b"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
async def test_scores_without_embeddings_name_the_flag(service: Service, path: str, body: dict[str, Any]) -> None:
    service.engine.model = dataclasses.replace(MODEL, embedding_size=0, max_embed_tokens=0)
    response = await service.post(path, body)
    assert response.status == 400
    assert "--embeddings" in (await response.json())["error"]["message"]


async def test_a_model_that_ranks_reads_pairs(service: Service) -> None:
    service.engine.model = dataclasses.replace(MODEL, embedding_size=0, ranks=True)
    reply = await score(service, text_1="ab", text_2=["c", "defg"])
    # Each text begins with a token of its own.
    assert [one["score"] for one in reply["data"]] == [1 / 5, 1 / 8]
    assert reply["usage"]["total_tokens"] == 13
    ranked = await rerank(service, query="ab", documents=["defg", "c", "de"])
    assert [one["index"] for one in ranked["results"]] == [1, 2, 0]
    response = await service.post("/v1/rerank", {"query": "ab", "documents": ["c", "d" * 64]})
    assert (await response.json())["error"]["param"] == "documents[1]"
