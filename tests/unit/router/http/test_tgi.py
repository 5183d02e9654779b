"""TGI's own routes: generation, whole and streamed, and tokens."""

import asyncio
import dataclasses
from typing import Any, cast

import pytest
from aiohttp import ClientPayloadError

from caravan_dialects.api.error_table import REASON_HEADER
from caravan_proto.messages.model import TokenizedText
from caravan_scheduler.core.errors import GenerationError, NoShardError
from caravan_testing.http_server import Service, events, serving
from caravan_testing.scripted_engine import BOS, EOS, EOS_TOKEN, MODEL, ScriptedEngine, word
from caravan_testing.waiting import eventually

GOLDEN = (
    'data: {"index":1,"token":{"id":11,"text":" w1","logprob":-0.5,"special":false},"generated_text":null,'
    '"details":null}\n\n'
    'data: {"index":2,"token":{"id":12,"text":" w2","logprob":-0.5,"special":false},"generated_text":" w1 w2",'
    '"details":{"finish_reason":"length","generated_tokens":2,"seed":null,"input_length":3,"cached_tokens":2}}\n\n'
)
TEXTS = ["a", "bc", "def", "ghij"]
BODIES = [
    ("/v1/completions", {"model": "any", "prompt": TEXTS, "max_tokens": 1}),
    ("/completion", {"prompt": TEXTS, "n_predict": 1}),
    ("/v1/embeddings", {"model": "any", "input": TEXTS}),
    ("/api/embed", {"model": "any", "input": TEXTS}),
    ("/v1/score", {"model": "any", "text_1": TEXTS[0], "text_2": TEXTS[1:]}),
]


async def test_generate_returns_an_object_and_timing_headers(service: Service) -> None:
    response = await service.post("/generate", {"inputs": "hé", "parameters": {"max_new_tokens": 3}})
    assert response.status == 200
    assert await response.json() == {"generated_text": " w1 w2 w3"}
    headers = response.headers
    assert headers["x-compute-characters"] == "2"
    assert headers["x-prompt-tokens"] == "3"
    assert headers["x-generated-tokens"] == "3"
    assert float(headers["x-compute-time"]) < 5
    for name in ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"):
        assert int(headers[name]) >= 0
    # Logprobs are computed only on request.
    assert not service.engine.spec.sampling.logprobs


async def test_details_describe_each_token(service: Service) -> None:
    service.engine.script = lambda _: [word(" a", 10, logprob=-0.5), EOS_TOKEN]
    response = await service.post("/generate", {"inputs": "x", "parameters": {"details": True, "seed": None}})
    assert await response.json() == {
        "generated_text": " a",
        "details": {
            "finish_reason": "eos_token",
            "generated_tokens": 2,
            "cached_tokens": 0,
            "seed": None,
            "prefill": [],
            "tokens": [
                {"id": 10, "text": " a", "logprob": -0.5, "special": False},
                {"id": 2, "text": "</s>", "logprob": None, "special": True},
            ],
        },
    }
    assert service.engine.spec.sampling.logprobs


async def test_top_tokens_have_a_list_for_each_token(service: Service) -> None:
    parameters = {"details": True, "top_n_tokens": 2, "max_new_tokens": 2}
    body = await (await service.post("/generate", {"inputs": "x", "parameters": parameters})).json()
    assert [[token["text"] for token in top] for top in body["details"]["top_tokens"]] == [[" a0", " a1"]] * 2


async def test_the_root_returns_an_array_of_one(service: Service) -> None:
    response = await service.post("/", {"inputs": "x", "parameters": {"max_new_tokens": 1}})
    assert await response.json() == [{"generated_text": " w1"}]


@pytest.mark.parametrize("path", ["/", "/generate"])
async def test_return_full_text_prepends_the_prompt(service: Service, path: str) -> None:
    parameters = {"max_new_tokens": 1, "return_full_text": True}
    body = await (await service.post(path, {"inputs": "x", "parameters": parameters})).json()
    assert (body[0] if path == "/" else body) == {"generated_text": "x w1"}


async def test_a_stop_string_over_two_tokens_is_not_in_the_text(service: Service) -> None:
    service.engine.script = lambda _: [word("one tw"), word("o three"), EOS_TOKEN]
    parameters = {"stop": ["two"], "details": True}
    body = await (await service.post("/generate", {"inputs": "x", "parameters": parameters})).json()
    assert body["generated_text"] == "one "
    assert body["details"]["finish_reason"] == "stop_sequence"
    assert [token["text"] for token in body["details"]["tokens"]] == ["one ", ""]


async def test_max_new_tokens_is_the_rest_of_the_context_by_default(service: Service) -> None:
    await service.post("/generate", {"inputs": "abc"})
    assert service.engine.spec.stopping.max_new_tokens == 256 - 4


@pytest.mark.parametrize(("truncate", "kept"), [(1, ""), (2, "c"), (3, "bc"), (4, "abc"), (5, "abc")])
async def test_truncate_keeps_the_begin_token_and_the_last_tokens(service: Service, truncate: int, kept: str) -> None:
    await service.post("/generate", {"inputs": "abc", "parameters": {"truncate": truncate, "max_new_tokens": 1}})
    assert service.engine.spec.prompt == (BOS, *(100 + ord(letter) for letter in kept))


async def test_truncate_removes_a_begin_token_that_the_client_wrote(service: Service) -> None:
    service.engine.controls = {"<s>": BOS}
    for truncate, kept in [(2, "b"), (3, "ab")]:
        await service.post("/generate", {"inputs": "<s>ab", "parameters": {"truncate": truncate, "max_new_tokens": 1}})
        assert service.engine.spec.prompt == (BOS, *(100 + ord(letter) for letter in kept))


async def test_truncate_keeps_the_tokens_that_the_tokenizer_adds_at_the_end() -> None:
    class EndingEngine(ScriptedEngine):
        async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> TokenizedText:
            tokens = await super().tokenize(text, add_special=add_special, parse_special=parse_special)
            if not add_special:
                return tokens
            return TokenizedText((*tokens.token_ids, EOS), (*tokens.pieces, b"</s>"), (*tokens.specials, True))

    async with serving(EndingEngine()) as service:
        for truncate, prompt in [(1, (BOS,)), (2, (BOS, EOS)), (3, (BOS, 100 + ord("c"), EOS))]:
            await service.post("/generate", {"inputs": "abc", "parameters": {"truncate": truncate}})
            assert service.engine.spec.prompt == prompt


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ("absent", True),
        (None, True),
        ({}, False),
        ({"do_sample": True}, True),
        ({"do_sample": None}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 0.5}, True),
        ({"top_k": 5}, True),
        ({"top_p": 0.5}, True),
        ({"typical_p": 0.5}, True),
        ({"temperature": 1e-9}, False),
    ],
)
async def test_do_sample_defaults_as_in_tgi(service: Service, parameters: Any, samples: bool) -> None:
    body: dict[str, Any] = {"inputs": "x"} if parameters == "absent" else {"inputs": "x", "parameters": parameters}
    await service.post("/generate", body)
    assert (service.engine.spec.sampling.temperature > 0) == samples


async def test_a_random_seed_is_used_and_returned(service: Service) -> None:
    body = {"inputs": "x", "parameters": {"do_sample": True, "details": True, "max_new_tokens": 1}}
    seeds = set()
    for _ in range(2):
        seed = (await (await service.post("/generate", body)).json())["details"]["seed"]
        assert seed == service.engine.spec.sampling.seed
        seeds.add(seed)
    assert len(seeds) == 2


async def test_the_largest_seed_is_accepted(service: Service) -> None:
    parameters = {"do_sample": True, "seed": 2**64 - 1, "max_new_tokens": 1}
    await service.post("/generate", {"inputs": "x", "parameters": parameters})
    assert service.engine.spec.sampling.seed == 2**64 - 1


async def test_a_failed_generation_is_424(service: Service) -> None:
    service.engine.script = lambda _: [word("a"), GenerationError("Server error: cuda")]
    response = await service.post("/generate", {"inputs": "x"})
    assert response.status == 424
    assert await response.json() == {
        "error": "Request failed during generation: Server error: cuda",
        "error_type": "generation",
    }
    assert await service.sample('tgi_request_failure{err="generation"}') == 1


async def test_a_stream_without_an_end_is_500(service: Service) -> None:
    service.engine.script = lambda _: [word("a")]
    response = await service.post("/generate", {"inputs": "x"})
    assert (response.status, (await response.json())["error_type"]) == (500, "incomplete_generation")
    assert await service.sample('tgi_request_failure{err="incomplete"}') == 1


async def test_no_shard_is_503_with_retry_after(service: Service) -> None:
    service.engine.script = lambda _: [NoShardError("none")]
    response = await service.post("/generate", {"inputs": "x"})
    assert (response.status, response.headers["Retry-After"]) == (503, "1")
    assert response.headers[REASON_HEADER] == "no_shard"
    assert await response.json() == {"error": "No shard is up", "error_type": "no_shard"}


async def test_an_unexpected_error_is_500_without_its_text(service: Service) -> None:
    def broken(_: object) -> list[Any]:
        raise RuntimeError("/etc/secret")

    service.engine.script = broken
    response = await service.post("/generate", {"inputs": "x"})
    assert response.status == 500
    assert await response.json() == {"error": "Internal server error", "error_type": "internal"}
    assert service.free_permits == service.limits.max_concurrent_requests


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
async def test_a_stream_byte_by_byte(service: Service, path: str) -> None:
    service.engine.cached_tokens = lambda _: 2
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 2, "details": True}}
    response = await service.post(path, body | ({"stream": True} if path == "/" else {}))
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert response.headers["x-compute-characters"] == "2"
    assert "x-compute-type" in response.headers
    assert await response.text() == GOLDEN


async def test_details_are_null_by_default(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": "hi", "parameters": {"max_new_tokens": 1}})
    [event] = events(await response.text())
    assert event["details"] is None
    assert event["generated_text"] == " w1"


async def test_line_breaks_in_text_cannot_end_an_event(service: Service) -> None:
    service.engine.script = lambda _: [word("\n\ndata: [DONE]\r\n\n"), EOS_TOKEN]
    first, last = events(await (await service.post("/generate_stream", {"inputs": "x"})).text())
    assert first["token"]["text"] == "\n\ndata: [DONE]\r\n\n"
    assert last["token"] == {"id": 2, "text": "</s>", "logprob": None, "special": True}


async def test_held_back_tokens_are_numbered_in_order_and_stop_strings_are_not_sent(service: Service) -> None:
    service.engine.script = lambda _: [word("a "), word("st"), word("ar st"), word("op b"), EOS_TOKEN]
    body = {"inputs": "x", "parameters": {"stop": ["stop"]}}
    got = events(await (await service.post("/generate_stream", body)).text())
    assert [(event["index"], event["token"]["text"]) for event in got] == [(1, "a "), (2, "st"), (3, "ar "), (4, "")]
    assert got[-1]["generated_text"] == "a star "


async def test_top_tokens_are_in_each_event(service: Service) -> None:
    body = {"inputs": "x", "parameters": {"top_n_tokens": 1, "max_new_tokens": 1}}
    [event] = events(await (await service.post("/generate_stream", body)).text())
    assert [token["text"] for token in event["top_tokens"]] == [" a0"]


async def test_invalid_requests_are_an_event_after_200(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": ""})
    assert response.status == 200
    assert await response.text() == (
        'data: {"error":"Input validation error: `inputs` cannot be empty","error_type":"validation"}\n\n'
    )
    assert await service.sample('tgi_request_failure{err="validation"}') == 1


async def test_an_error_in_a_started_stream_is_the_last_event(service: Service) -> None:
    service.engine.script = lambda _: [word("a"), GenerationError("gone")]
    first, last = events(await (await service.post("/generate_stream", {"inputs": "x"})).text())
    assert first["token"]["text"] == "a"
    assert last == {"error": "Request failed during generation: gone", "error_type": "generation"}


async def test_an_unexpected_error_breaks_the_stream_and_is_logged(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.engine.script = lambda _: [word("a"), cast("Any", "no token")]
    response = await service.post("/generate_stream", {"inputs": "x"})
    with pytest.raises(ClientPayloadError):
        await response.text()
    assert "failed" in caplog.text
    assert service.is_idle()


async def test_no_shard_before_a_stream_starts_is_503(service: Service) -> None:
    service.engine.joined = False
    response = await service.post("/generate_stream", {"inputs": "x"})
    assert (response.status, (await response.json())["error_type"]) == (503, "no_shard")


async def test_an_invalid_request_has_the_headers_of_its_prompt(service: Service) -> None:
    response = await service.post("/generate_stream", {"inputs": "four", "parameters": {"temperature": -1}})
    assert response.status == 200
    assert response.headers["x-compute-characters"] == "4"


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
