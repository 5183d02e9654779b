"""Models of some kilobytes, served as a user serves them: they embed, rank, and search as transformers does."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession
from gguf import PoolingType

from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_tiny_bert import CLS, SEP, TOKENS, TinyBert
from caravan_testing.shard_tiny_llama import END_TOKEN_IDS, write_tiny_llama

# grpc.aio works only on the event loop on which it was first used.
pytestmark = pytest.mark.asyncio(loop_scope="session")

BERT, RANKER = TinyBert(), TinyBert(pooling=PoolingType.RANK, labels=1)
TEXTS = ["the river", "a city in paris", "bread"]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    models = [BERT.write(folder / "bert.gguf"), RANKER.write(folder / "ranker.gguf")]
    with serve("-t", "1", models=models) as running:
        yield running


async def post(served: Served, path: str, body: Any, status: int = 200) -> Any:
    async with ClientSession() as session, session.post(f"{served.url}{path}", json=body) as response:
        assert response.status == status, await response.text()
        return await response.json()


def ids(text: str) -> list[int]:
    return [TOKENS.index(f"▁{word}") for word in text.split()]


def vectors(texts: list[str]) -> Any:
    """Return the vectors that numpy computes."""
    return [BERT.vector([CLS, *ids(text), SEP]) for text in texts]


async def test_every_dialect_returns_the_vectors_of_the_model(served: Served) -> None:
    reply = await post(served, "/v1/embeddings", {"input": TEXTS})
    assert (reply["model"], reply["usage"]["prompt_tokens"]) == ("bert.gguf", 4 + 6 + 3)
    np.testing.assert_allclose([entry["embedding"] for entry in reply["data"]], vectors(TEXTS), atol=TOLERANCE)
    reply = await post(served, "/api/embed", {"model": "bert.gguf", "input": TEXTS})
    np.testing.assert_allclose(reply["embeddings"], vectors(TEXTS), atol=TOLERANCE)
    reply = await post(served, "/api/embeddings", {"model": "bert.gguf", "prompt": TEXTS[0]})
    np.testing.assert_allclose(reply["embedding"], vectors(TEXTS)[0], atol=TOLERANCE)
    reply = await post(served, "/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    first, *others = vectors(TEXTS)
    assert [one["score"] for one in reply["data"]] == pytest.approx([first @ other for other in others], abs=1e-3)


async def test_many_texts_of_many_clients_have_their_own_vectors(served: Served) -> None:
    expected = dict(zip(TEXTS, vectors(TEXTS), strict=True))
    texts = TEXTS * 40
    async with ClientSession() as session:
        for _ in range(2):
            calls = [session.post(f"{served.url}/v1/embeddings", json={"input": texts[turn:]}) for turn in range(6)]
            for turn, call in enumerate(calls):
                async with call as response:
                    data = (await response.json())["data"]
                made = [entry["embedding"] for entry in data]
                np.testing.assert_allclose(made, [expected[text] for text in texts[turn:]], atol=TOLERANCE)


async def test_a_text_that_is_too_long_is_refused(served: Served) -> None:
    error = (await post(served, "/v1/embeddings", {"input": "bread " * 127}, status=400))["error"]
    assert "resulted in 129 tokens, and at most 128 are allowed" in error["message"]


async def test_documents_are_ranked(served: Served) -> None:
    documents = ["in france", "bread", "the river"]
    expected = [RANKER.relevance([CLS, *ids("where is paris"), SEP, *ids(document)]) for document in documents]
    body = {"model": "ranker.gguf", "query": "where is paris", "documents": documents}
    ranked = (await post(served, "/v1/rerank", body))["results"]
    assert [one["index"] for one in ranked] == sorted(range(3), key=lambda index: -expected[index])
    for one in ranked:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=TOLERANCE)
    error = (await post(served, "/v1/embeddings", {"model": "ranker.gguf", "input": "a"}, status=400))["error"]
    assert "/v1/rerank" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"inputs": "a"}, 422),
        ("/v1/completions", {"prompt": "a"}, 400),
        ("/v1/chat/completions", CHAT, 400),
        ("/v1/responses", {"input": "a"}, 400),
        ("/v1/messages", {"max_tokens": 3, **CHAT}, 400),
        ("/completion", {"prompt": "a"}, 400),
        ("/api/generate", {"model": "bert.gguf", "prompt": "a"}, 400),
        ("/api/chat", {"model": "bert.gguf", **CHAT}, 400),
    ],
)
async def test_what_generates_is_refused_with_the_reason(
    served: Served, path: str, body: dict[str, Any], status: int
) -> None:
    error = (await post(served, path, body, status))["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "'bert.gguf' cannot generate text, it only embeds texts: use /v1/embeddings" in message


async def test_the_models_are_described(served: Served) -> None:
    shown = await post(served, "/api/show", {"model": "bert.gguf"})
    assert (shown["capabilities"], shown["details"]["family"]) == (["embedding"], "bert")
    async with ClientSession() as session, session.get(f"{served.url}/v1/models") as response:
        assert [entry["id"] for entry in (await response.json())["data"]] == ["bert.gguf", "ranker.gguf"]


async def test_a_file_that_cannot_be_loaded_ends_the_server_with_a_line(tmp_path: Path) -> None:
    model = BERT.write(tmp_path / "cut.gguf")
    model.write_bytes(model.read_bytes()[:-1000])
    command = [sys.executable, "-m", "caravan_serve", "serve", "--model", str(model), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)  # noqa: ASYNC221
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    *lines, last = done.stderr.splitlines()
    # The shard may say so before the server says that it listens.
    assert [line for line in lines if line.startswith("caravan-shard: error: llama.cpp cannot load")]
    assert last == "caravan serve: error: shard-0 could not start; its message is above"


_CASES = json.loads((Path(__file__).parent / "beams_of_tiny_llama.json").read_text())["cases"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")
    # transformers computes with 32-bit keys and values.
    exact = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
    with serve("-np", "4", "-c", "512", "-t", "1", "--kv-layout", "unified", *exact, models=[model]) as running:
        yield running


async def test_outputs_and_scores_are_those_of_transformers(tiny: Served) -> None:
    assert len(_CASES) == 36
    async with ClientSession() as session:
        for case in _CASES:
            body = {
                "prompt": case["prompt"],
                "use_beam_search": True,
                "n": case["width"],
                "length_penalty": case["length_penalty"],
                "early_stopping": case["early_stopping"],
                "max_tokens": 12,
                "stop_token_ids": list(END_TOKEN_IDS[1:]),
                "logprobs": 0,
                "return_token_ids": True,
            }
            async with session.post(f"{tiny.url}/v1/completions", json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
            outputs = [choice["token_ids"] for choice in reply["choices"]]
            assert outputs == case["outputs"], case
            for choice, score in zip(reply["choices"], case["scores"], strict=True):
                logprobs = choice["logprobs"]["token_logprobs"]
                assert sum(logprobs) / len(logprobs) ** case["length_penalty"] == pytest.approx(score, abs=0.01)
