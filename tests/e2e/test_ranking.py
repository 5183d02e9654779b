"""A model with rank pooling, served as a user serves it."""

from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_tiny_bert import write_tiny_ranker

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

DOCUMENTS = ["yes", "no", "b"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tiny_ranker(tmp_path_factory.mktemp("model") / "ranker.gguf")
    with serve("-np", "2", "-c", "512", "-t", "1", "--embeddings", models=[model]) as running:
        yield running


async def post(served: Served, path: str, body: Any, status: int = 200) -> Any:
    async with ClientSession() as session, session.post(f"{served.url}{path}", json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def test_documents_are_ranked_by_the_scores_of_their_pairs(ranker: Served) -> None:
    scores = (await post(ranker, "/v1/score", {"text_1": "a?", "text_2": DOCUMENTS}))["data"]
    values = [one["score"] for one in scores]
    assert len(set(values)) == 3
    assert all(0 < value < 1 for value in values)
    ranked = (await post(ranker, "/v1/rerank", {"query": "a?", "documents": DOCUMENTS}))["results"]
    assert [one["relevance_score"] for one in ranked] == sorted(values, reverse=True)
    assert [values[one["index"]] for one in ranked] == sorted(values, reverse=True)


async def test_a_model_that_ranks_has_no_vectors_and_still_generates(ranker: Served) -> None:
    error = (await post(ranker, "/v1/embeddings", {"input": "a"}, status=400))["error"]
    assert "/v1/rerank" in error["message"]
    reply = await post(ranker, "/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    assert reply["usage"]["completion_tokens"] == 3
