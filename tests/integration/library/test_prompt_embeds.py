"""Embeddings as prompts of `LLM`, `Client` and over HTTP, with the toy model, whose embeddings are its token ids."""

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from caravan import LLM, Client, ContextLengthError, Embeddings, RequestError, SamplingParams
from caravan.client import InvalidRequestError
from caravan.media import npy_of
from caravan_scheduler.core.media import Embeddings as Rows

_TEXT = b"as embeddings"
_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=1024, enable_prompt_embeds=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with llm.serve(port=0) as server:
        yield server.url


def _rows(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).astype(np.float32).reshape(-1, 1)


def _file(data: bytes) -> str:
    return base64.b64encode(npy_of(Rows.of_bytes(len(data), 1, _rows(data).tobytes()))).decode()


def test_a_prompt_of_embeddings_counts_as_its_tokens(llm: LLM) -> None:
    prompts: list[Any] = [
        list(_TEXT),
        {"prompt_embeds": _rows(_TEXT)},
        {"prompt_embeds": Embeddings.of(_rows(_TEXT))},
        "text",
    ]
    prompts += [{"prompt_embeds": _rows(_TEXT).astype(kind)[None]} for kind in ("f2", "f8")]
    expected, given, embeddings, text, *others = llm.generate(prompts, _GREEDY)
    assert given.outputs == embeddings.outputs == expected.outputs != text.outputs
    assert all(one.outputs == expected.outputs for one in others)
    assert (given.prompt_token_ids, given.num_prompt_tokens) == ([], len(_TEXT))
    assert given.prompt is None
    (whole,) = llm.generate({"prompt_embeds": _rows(_TEXT)}, SamplingParams(temperature=0, max_tokens=None))
    assert whole.outputs[0].token_ids[:1] == expected.outputs[0].token_ids[:1]


def test_wrong_embeddings_are_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="must have 1 values for each token"):
        llm.generate({"prompt_embeds": np.zeros((2, 3), np.float32)}, _GREEDY)
    with pytest.raises(RequestError, match="between -65504 and 65504"):
        llm.generate({"prompt_embeds": np.array([[np.nan]])}, _GREEDY)
    with pytest.raises(RequestError, match=r"\[tokens, size\]"):
        llm.generate({"prompt_embeds": [1, 2]}, _GREEDY)
    with pytest.raises(ContextLengthError, match="prompt_embeds"):
        llm.generate({"prompt_embeds": np.zeros((1100, 1), np.float32)}, _GREEDY)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        llm.generate({"prompt_embeds": _rows(_TEXT)}, SamplingParams(prompt_logprobs=1))
    with (
        LLM("toy.gguf", backend="fake", parallel=1, ctx_size=256) as other,
        pytest.raises(RequestError, match="enable_prompt_embeds"),
    ):
        other.generate({"prompt_embeds": _rows(_TEXT)}, _GREEDY)


def test_a_client_sends_them(llm: LLM, url: str) -> None:
    (expected,) = llm.generate([list(_TEXT)], _GREEDY)
    with Client(url) as client:
        (given,) = client.generate({"prompt_embeds": _rows(_TEXT)}, _GREEDY)
        assert given.outputs[0].text == expected.outputs[0].text
        assert given.prompt_token_ids == []
        with pytest.raises(InvalidRequestError, match=r"\[tokens, 1\]"):
            client.generate({"prompt_embeds": np.zeros((2, 3), np.float32)}, _GREEDY)


def _post(url: str, **fields: Any) -> tuple[int, Any]:
    body = json.dumps({"max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def test_files_come_before_texts(llm: LLM, url: str) -> None:
    prompts: list[Any] = [list(b"one"), list(b"two"), "three"]
    expected = [
        one.outputs[0].text
        for one in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    ]
    files = [_file(b"one"), _file(b"two")]
    status, reply = _post(url, prompt="three", prompt_embeds=files, return_token_ids=True)
    assert status == 200
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in reply["choices"][:2]] == [[], []]
    assert reply["usage"]["prompt_tokens"] == 12
    status, reply = _post(url, prompt="", prompt_embeds=files[1])
    assert [choice["text"] for choice in reply["choices"]] == expected[1:2]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "`prompt` is missing"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_embeds": []}, "`prompt` is missing"),
        ({"prompt_embeds": "###"}, "`prompt_embeds` must be valid base64"),
        ({"prompt_embeds": [_file(b"a"), "AAAA"]}, r"`prompt_embeds[1]` must be a file of numpy.save"),
        ({"prompt_embeds": _file(b"a"), "echo": True}, "`echo`"),
        ({"prompt_embeds": _file(b"a"), "prompt_logprobs": 0}, "`prompt_logprobs`"),
        ({"prompt_embeds": [_file(b"a")] * 33}, "32"),
        ({"prompt_embeds": _file(b"a" * 2000)}, "2000"),
    ],
)
def test_what_cannot_be_read_is_named(url: str, fields: dict[str, Any], problem: str) -> None:
    status, message = _post(url, **fields)
    assert (status, problem in message) == (400, True), message
