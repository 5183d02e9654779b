"""A model that computes NaN or infinite logits for some prompts: these requests fail by name, and others go on."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from caravan import LLM, Executor, GenerationError, SamplingParams, Server, StructuredOutputsParams
from caravan_testing.shard_models import DEMO_MODEL, fetched
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.waiting import DEADLINE_S

pytestmark = pytest.mark.model

_REASON = "the model computed no finite logits"
_BAD, _GOOD = "wizard Zebra", "wizard apple"


# By name: NaN is not equal to itself, so each test would get a model of its own.
@pytest.fixture(scope="module", params=["nan", pytest.param("inf", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose weights of one word are no numbers."""
    words = fetched(DEMO_MODEL)
    vocabulary = llama_cpp.Llama(str(words), vocab_only=True, verbose=False)
    token = vocabulary.tokenize(_BAD.encode(), add_bos=False)[-1]
    path = tmp_path_factory.mktemp("broken") / "broken.gguf"
    return write_tiny_llama(path, Shape(embedding=32, context=2048), words, broken={token: float(request.param)})


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), parallel=8, ctx_size=8192, threads=1, speculate=4, flash_attn="on") as opened:
        yield opened


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with llm.serve(port=0) as started:
        yield started


_PARAMETERS = {
    "greedy": SamplingParams(temperature=0, max_tokens=6),
    "drawn": SamplingParams(temperature=1.0, seed=1, max_tokens=6),
    "filtered": SamplingParams(temperature=1.0, seed=1, top_k=20, top_p=0.9, max_tokens=6),
    "several": SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6),
    "best": SamplingParams(temperature=1.0, seed=1, n=1, best_of=3, max_tokens=6),
    "beams": SamplingParams(temperature=0, n=2, use_beam_search=True, max_tokens=6),
    "logprobs": SamplingParams(temperature=0, logprobs=3, max_tokens=6),
    "prompt logprobs": SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=6),
    "regex": SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="[ab]{5}"), max_tokens=6),
    "mirostat": SamplingParams(temperature=1.0, seed=1, mirostat=2, max_tokens=6),
    "biased": SamplingParams(temperature=0, logit_bias={5: 3.0}, max_tokens=6),
    "processors": SamplingParams(temperature=0, logits_processors=[lambda _, logits: logits], max_tokens=6),
}


@pytest.mark.parametrize("params", _PARAMETERS.values(), ids=_PARAMETERS)
def test_a_program_gets_an_error_for_each_kind_of_request(llm: LLM, params: SamplingParams) -> None:
    with pytest.raises(GenerationError, match=_REASON):
        llm.generate(_BAD, params)
    (good,) = llm.generate(_GOOD, params)
    assert good.outputs[0].token_ids


@pytest.mark.parametrize("layout", ["unified", "split"])
def test_without_flash_attention_what_it_leaves_in_cells_spoils_no_later_request(model: Path, layout: str) -> None:
    with LLM(str(model), parallel=4, ctx_size=1024, threads=1, flash_attn="off", kv_layout=layout) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=6)
        expected = llm.generate(_GOOD, greedy)[0].outputs[0].token_ids
        with pytest.raises(GenerationError, match=_REASON):
            # Its last cell is among those that llama.cpp multiplies by 0 for a short sequence.
            llm.generate("wizard " * 40 + _BAD, greedy)
        for _ in range(2):
            assert llm.generate(_GOOD, greedy)[0].outputs[0].token_ids == expected


def test_a_conversation_that_is_stepped_by_hand_gets_it_too(model: Path) -> None:
    with Executor(str(model), ctx_size=512) as executor, executor.create() as conversation:
        conversation.prompt(_BAD)
        with pytest.raises(GenerationError, match=_REASON):
            list(conversation.generate(4))


def _bodies(prompt: str) -> dict[str, tuple[str, dict[str, Any]]]:
    chat = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 6}
    ollama = {"model": "broken.gguf", "stream": False, "options": {"num_predict": 6}}
    return {
        "completions": ("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0}),
        "completions, drawn": ("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 6, "n": 2, "seed": 1}),
        "completions, echo": (
            "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 6, "echo": True, "logprobs": 2}
        ),
        "beams": (
            "/v1/completions",
            {"model": "m", "prompt": prompt, "max_tokens": 6, "n": 2, "use_beam_search": True, "temperature": 0},
        ),
        "chat": ("/v1/chat/completions", chat),
        "chat, json": ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}),
        "responses": ("/v1/responses", {"model": "m", "input": prompt, "max_output_tokens": 16}),
        "messages": ("/v1/messages", chat),
        "generate": ("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 6, "details": True}}),
        "generate, decoder_input_details": (
            "/generate",
            {"inputs": prompt, "parameters": {"max_new_tokens": 6, "details": True, "decoder_input_details": True}},
        ),
        "ollama": ("/api/generate", ollama | {"prompt": prompt}),
        "ollama, chat": ("/api/chat", ollama | {"messages": chat["messages"]}),
        "llama-server": ("/completion", {"prompt": prompt, "n_predict": 6}),
    }  # fmt: skip


_DIALECTS = tuple(_bodies(""))
# Those that have no streams.
_WHOLE_ONLY = ("beams", "generate, decoder_input_details")


def _ask(url: str, body: dict[str, Any]) -> tuple[int, str]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("dialect", _DIALECTS)
def test_every_dialect_answers_with_an_error(server: Server, dialect: str) -> None:
    path, body = _bodies(_BAD)[dialect]
    status, text = _ask(server.url + path, body)
    assert status >= 400, text
    assert _REASON in text
    path, body = _bodies(_GOOD)[dialect]
    status, text = _ask(server.url + path, body)
    assert (status, _REASON in text) == (200, False), text


@pytest.mark.parametrize("dialect", [one for one in _DIALECTS if one not in _WHOLE_ONLY])
def test_every_stream_ends_with_the_error(server: Server, dialect: str) -> None:
    path, body = _bodies(_BAD)[dialect]
    path = path.replace("/generate", "/generate_stream") if path == "/generate" else path
    _, text = _ask(server.url + path, body | ({} if path == "/generate_stream" else {"stream": True}))
    assert _REASON in text
