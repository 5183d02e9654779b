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


async def test_what_vllm_tells_of_itself(service: Service) -> None:
    version = await (await service.client.get("/version")).json()
    assert version == await (await service.client.get("/api/version")).json()
    assert await (await service.client.get("/load")).json() == {"server_load": 0}
    assert await (await service.client.get("/is_sleeping")).json() == {"is_sleeping": False}


async def test_a_server_that_waits_for_its_model_does_not_sleep() -> None:
    async with serving(ScriptedEngine(joined=False)) as service:
        assert await (await service.client.get("/is_sleeping")).json() == {"is_sleeping": False}
