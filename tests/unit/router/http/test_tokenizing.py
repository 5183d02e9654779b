"""The texts of one request are tokenized together, and an error names the first wrong one."""

import asyncio
import dataclasses
from typing import Any

import pytest

from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import MODEL
from caravan_testing.waiting import eventually

TEXTS = ["a", "bc", "def", "ghij"]
BODIES = [
    ("/v1/completions", {"model": "any", "prompt": TEXTS, "max_tokens": 1}),
    ("/completion", {"prompt": TEXTS, "n_predict": 1}),
    ("/v1/embeddings", {"model": "any", "input": TEXTS}),
    ("/api/embed", {"model": "any", "input": TEXTS}),
    ("/v1/score", {"model": "any", "text_1": TEXTS[0], "text_2": TEXTS[1:]}),
]


async def _answered_together(service: Service, path: str, body: Any, texts: int) -> Any:
    """Post ``body``, let no text be tokenized until ``texts`` of them are asked for, and return the reply."""
    service.engine.tokenizing = asyncio.Event()
    posting = asyncio.create_task(service.post(path, body))
    await eventually(lambda: service.engine.texts_waiting == texts, f"{texts} texts are tokenized at once")
    service.engine.tokenizing.set()
    reply = await posting
    return reply.status, await reply.json()


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_texts_of_a_request_are_tokenized_together(service: Service, path: str, body: Any) -> None:
    status, _ = await _answered_together(service, path, body, len(TEXTS))
    assert status == 200


async def test_the_pairs_of_a_model_that_ranks_are_tokenized_together(service: Service) -> None:
    service.engine.model = dataclasses.replace(MODEL, ranks=True, embedding_size=0)
    body = {"model": "any", "query": "q", "documents": TEXTS}
    status, _ = await _answered_together(service, "/v1/rerank", body, len(TEXTS))
    assert status == 200


async def test_outputs_keep_the_order_of_the_prompts(service: Service) -> None:
    body = {"model": "any", "prompt": TEXTS, "max_tokens": 1, "echo": True}
    _, reply = await _answered_together(service, "/v1/completions", body, len(TEXTS))
    assert [choice["text"] for choice in reply["choices"]] == [f"{text} w1" for text in TEXTS]


async def test_of_several_wrong_texts_the_error_names_the_first(service: Service) -> None:
    """All texts are refused for their tokens, which are known in another order."""
    texts = ["fine", "x" * 70, "y" * 90]
    release = [asyncio.Event() for _ in texts]
    tokenize = service.engine.tokenize

    async def in_reverse(text: str, **options: Any) -> Any:
        number = texts.index(text)
        if number + 1 < len(texts):
            await release[number + 1].wait()
        release[number].set()
        return await tokenize(text, **options)

    service.engine.tokenize = in_reverse  # type: ignore[method-assign]
    reply = await service.post("/v1/embeddings", {"model": "any", "input": texts})
    assert reply.status == 400
    assert (
        "your `input[1]` resulted in 71 tokens, and at most 64 are allowed" in (await reply.json())["error"]["message"]
    )
