"""Paths that llama-server and vLLM have beside OpenAI's, and what tells of a prompt without answering it."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import SEEING_MODEL, ScriptedEngine
from caravan_testing.seen_prompts import picture_part, text_part

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(SEEING_MODEL, chat_template=TEMPLATE))


PATHS: list[tuple[str, str, dict[str, Any]]] = [
    ("/chat/completions", "/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/embeddings", "/v1/embeddings", {"input": "a"}),
    ("/rerank", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/reranking", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/v1/reranking", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    ("/responses", "/v1/responses", {"input": "hi", "max_output_tokens": 2}),
]
_OF_ONE_REPLY = {"id", "created", "created_at", "output", "completed_at"}


@pytest.mark.parametrize(("path", "same_as", "body"), PATHS)
async def test_another_path_answers_alike(service: Service, path: str, same_as: str, body: dict[str, Any]) -> None:
    one, other = await service.reply(path, body), await service.reply(same_as, body)
    assert {k: v for k, v in one.items() if k not in _OF_ONE_REPLY} == {
        k: v for k, v in other.items() if k not in _OF_ONE_REPLY
    }
    refused = [await service.post(where, {"model": 5}) for where in (path, same_as)]
    assert [response.status for response in refused] == [400, 400]
    first, second = [await response.json() for response in refused]
    assert first == second
    assert first["error"]["type"] == "invalid_request_error"


async def test_the_tokens_of_a_chat_are_counted(service: Service, engine: ScriptedEngine) -> None:
    for messages in (HI, [{"role": "user", "content": [text_part("See"), picture_part()]}]):
        body = {"messages": messages}
        counted = await service.reply("/v1/chat/completions/input_tokens", body)
        assert not engine.streams
        reply = await service.reply("/v1/chat/completions", body | {"max_tokens": 1})
        assert counted == {"object": "response.input_tokens", "input_tokens": reply["usage"]["prompt_tokens"]}
        engine.streams.clear()
    response = await service.post("/v1/chat/completions/input_tokens", {"messages": []})
    assert (response.status, (await response.json())["error"]["param"]) == (400, "messages")


async def test_a_template_is_applied(service: Service, engine: ScriptedEngine) -> None:
    assert await service.reply("/apply-template", {"messages": HI}) == {"prompt": "<user>hi<bot>"}
    body = {"messages": HI, "add_generation_prompt": False, "continue_final_message": False}
    assert await service.reply("/apply-template", body) == {"prompt": "<user>hi"}
    assert not engine.streams
    response = await service.post("/apply-template", {"messages": [{"role": "robot", "content": "x"}]})
    assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")


_CHAT_HI = {"messages": HI}
RENDERED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions/render", "/v1/chat/completions", _CHAT_HI, {"max_tokens": 1}),
    ("/v1/messages/render", "/v1/messages", _CHAT_HI, {"max_tokens": 1}),
    ("/v1/responses/render", "/v1/responses", {"input": "hi"}, {"max_output_tokens": 1}),
]


@pytest.mark.parametrize(("path", "answered", "body", "more"), RENDERED)
async def test_the_tokens_of_a_prompt_are_told(
    service: Service, engine: ScriptedEngine, path: str, answered: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    rendered = await service.reply(path, body)
    assert not engine.streams
    await service.reply(answered, body | more)
    assert rendered == {"model": "scripted", "token_ids": list(engine.spec.prompt)}
    # Whoever routes by tokens sends the whole request.
    assert await service.reply(path, body | more | {"stream": True}) == rendered


async def test_the_tokens_of_several_prompts_are_told(service: Service, engine: ScriptedEngine) -> None:
    one, other = await service.reply("/v1/completions/render", {"prompt": ["ab", "c"], "max_tokens": 1})
    assert (len(one["token_ids"]), len(other["token_ids"])) == (3, 2)
    assert not engine.streams
    response = await service.post("/v1/completions/render", {"prompt": "a" * 300})
    assert (await response.json())["error"]["code"] == "context_length_exceeded"


async def test_what_is_rendered_has_no_media(service: Service, engine: ScriptedEngine) -> None:
    pictures = [{"role": "user", "content": [text_part("See"), picture_part()]}]
    plain = await service.reply("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "See"}]})
    assert await service.reply("/v1/chat/completions/render", {"messages": pictures}) == plain


TOKENS = "/inference/v1/generate"


async def test_tokens_go_in_and_tokens_come_out(service: Service, engine: ScriptedEngine) -> None:
    rendered = await service.reply("/v1/chat/completions/render", {"messages": HI})
    sampling = {"n": 2, "max_tokens": 2, "seed": 7, "logprobs": 1, "stop_token_ids": [5]}
    body = rendered | {"sampling_params": sampling, "request_id": "me", "return_token_ids": True}
    reply = await service.reply(TOKENS, body)
    prompt = len(rendered["token_ids"])
    assert reply.pop("created") > 0
    assert reply.pop("usage")["total_tokens"] == prompt + 4
    logprobs = {
        "content": [
            {
                "token_id": token_id,
                "logprob": -0.5,
                "rank": None,
                "top_logprobs": [
                    {"token_id": token_id, "logprob": -0.5, "rank": None},
                    {"token_id": 20, "logprob": -1.0, "rank": 1},
                ],
            }
            for token_id in (11, 12)
        ]
    }
    assert reply == {
        "output_mode": "tokens",
        "request_id": "me",
        "model": "scripted",
        "choices": [
            {"index": index, "finish_reason": "length", "token_ids": [11, 12], "logprobs": logprobs}
            for index in range(2)
        ],
        "prompt_logprobs": None,
        "prompt_token_ids": rendered["token_ids"],
        "kv_transfer_params": None,
    }
    assert {stream.spec.prompt for stream in engine.streams} == {tuple(rendered["token_ids"])}
    assert engine.spec.stopping.stop_token_ids == {5}


async def test_tokens_are_streamed_with_texts_if_wanted(service: Service) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}, "stream": True, "stream_options": options}
    first, second, last, done = await service.events(TOKENS, body | {"return_token_ids": True})
    assert done == "[DONE]"
    assert (first["prompt_token_ids"], "prompt_token_ids" in second) == ([5, 6], False)
    assert [chunk["choices"][0]["token_ids"] for chunk in (first, second)] == [[11], [12]]
    assert [chunk["usage"]["completion_tokens"] for chunk in (first, second, last)] == [1, 2, 2]
    assert (first["request_id"], last["choices"]) == (second["request_id"], [])
    reply = await service.reply(TOKENS, {"token_ids": [5], "sampling_params": {"max_tokens": 1}, "output_mode": "text"})
    assert reply["choices"][0]["text"] == " w1"


async def test_without_a_number_all_tokens_come_that_fit(service: Service, engine: ScriptedEngine) -> None:
    await service.reply(TOKENS, {"token_ids": [5, 6, 7]})
    assert engine.spec.stopping.max_new_tokens == engine.model.max_sequence_tokens - 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5000]}, "token_ids"),
        ({"token_ids": [1] * 300}, "token_ids"),
        ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
        ({"sampling_params": {"bad_words": ["a"]}}, "sampling_params.bad_words"),
        ({"features": {}}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"reasoning_ended": False}, "reasoning_ended"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
    ],
)
async def test_what_tokens_cannot_be_asked_for(service: Service, fields: dict[str, Any], param: str) -> None:
    response = await service.post(TOKENS, {"token_ids": [5], **fields})
    assert (response.status, (await response.json())["error"]["param"]) == (400, param)


async def test_what_vllm_tells_of_itself(service: Service) -> None:
    version = await (await service.client.get("/version")).json()
    assert version != await (await service.client.get("/api/version")).json(), "which is Ollama's"
    assert await (await service.client.get("/load")).json() == {"server_load": 0}
    assert await (await service.client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_a_server_that_waits_for_its_model_does_not_sleep() -> None:
    async with serving(ScriptedEngine(joined=False)) as service:
        assert await (await service.client.get("/is_sleeping")).json() == {"is_sleeping": False}
