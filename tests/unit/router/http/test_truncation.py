"""Turns that are left out of prompts that are too long."""

from typing import Any

import pytest

from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import WordEngine, count_up, prompt_text

CHAT, OLLAMA = "/v1/chat/completions", "/api/chat"


# Of 512 tokens, one for each character but for control tokens.
KEPT = 384


@pytest.fixture
def engine() -> WordEngine:
    return WordEngine()


def turn(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def history(turns: int) -> list[dict[str, Any]]:
    """Return a system message, ``turns`` turns of about 60 tokens, and the last one."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "S"}]
    for number in range(turns):
        messages += [turn(f"{number:02}" + "x" * 20), {"role": "assistant", "content": "a" * 20}]
    return [*messages, turn("Last")]


async def refused(service: Service, path: str, body: dict[str, Any]) -> str:
    response = await service.post(path, {"model": "any", **body})
    assert response.status == 400, await response.text()
    return await response.text()


async def ollama(service: Service, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply(OLLAMA, {"model": "any", "messages": messages, "stream": False, **body})
    return reply


async def test_a_chat_leaves_out_the_oldest_turns_only_if_asked(service: Service) -> None:
    body = {"messages": history(20)}
    for disabled in ({}, {"truncation": "disabled"}):
        assert "context length is 512 tokens" in await refused(service, CHAT, body | disabled)
    reply = await service.reply(CHAT, body | {"truncation": "auto"})
    turns = reply["truncated"]["turns"]
    assert turns > 0
    assert reply["truncated"]["messages"] == list(range(1, 1 + 2 * turns))
    text = prompt_text(service.engine)
    assert text.startswith(f"[system]S</s>[user]{turns:02}x")
    assert text.endswith("[user]Last</s>[assistant]")
    assert KEPT - 60 < reply["usage"]["prompt_tokens"] <= KEPT
    short = await service.reply(CHAT, {"messages": history(2), "truncation": "auto"})
    assert "truncated" not in short


async def test_the_first_chunk_of_a_stream_says_what_was_left_out(service: Service) -> None:
    body = {"messages": history(20), "truncation": "auto"}
    whole = await service.reply(CHAT, body)
    *chunks, _done = await service.events(CHAT, body | {"stream": True})
    assert [chunk.get("truncated") for chunk in chunks] == [whole["truncated"], *[None] * (len(chunks) - 1)]


async def test_system_messages_stay_where_turns_go(service: Service) -> None:
    messages = history(20)
    messages.insert(3, {"role": "system", "content": "Later"})
    reply = await service.reply(CHAT, {"messages": messages, "truncation": "auto"})
    assert reply["truncated"]["messages"][:4] == [1, 2, 4, 5]
    assert prompt_text(service.engine).startswith("[system]S</s>[system]Later</s>[user]")


async def test_room_is_left_for_the_tokens_that_are_asked_for(service: Service) -> None:
    service.engine.script = count_up
    body = {"messages": history(20), "truncation": "auto"}
    reply = await service.reply(CHAT, body | {"max_tokens": 200})
    assert reply["usage"]["prompt_tokens"] <= 312
    assert reply["usage"]["completion_tokens"] == 200
    # At most half of the context is kept free, and an output ends with it.
    reply = await service.reply(CHAT, body | {"max_completion_tokens": 5000})
    assert 196 < reply["usage"]["prompt_tokens"] <= 256
    assert reply["usage"]["total_tokens"] == 512
    assert reply["choices"][0]["finish_reason"] == "length"


CALL = {"id": "c1", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize("names_call", [True, False])
async def test_no_result_of_a_tool_loses_its_call(service: Service, names_call: bool) -> None:
    result = {"role": "tool", "content": "found", **({"tool_call_id": "c1"} if names_call else {})}
    messages = [
        turn("x" * 300),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        turn("Hurry"),
        result,
        {"role": "assistant", "content": "a" * 60},
        turn("Next"),
        {"role": "assistant", "content": "b" * 60},
        turn("Last"),
    ]
    reply = await service.reply(CHAT, {"messages": messages, "truncation": "auto"})
    # A cut before "Hurry" would leave enough out, but the result belongs to a call before it.
    assert reply["truncated"] == {"turns": 1, "messages": [0, 1, 2, 3, 4]}
    assert prompt_text(service.engine).startswith("[user]Next</s>")


async def test_no_output_of_a_response_loses_its_call(service: Service) -> None:
    items = [
        turn("x" * 300),
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        turn("Hurry"),
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"role": "assistant", "content": "a" * 60},
        turn("Next"),
        {"role": "assistant", "content": "b" * 60},
        turn("Last"),
    ]
    reply = await service.reply("/v1/responses", {"input": items, "truncation": "auto"})
    assert (reply["truncated"]["turns"], len(reply["truncated"]["items"])) == (1, 5)
    assert prompt_text(service.engine).startswith("[user]Next</s>")


@pytest.mark.parametrize("path", [CHAT, OLLAMA])
async def test_a_last_turn_that_does_not_fit_is_refused(service: Service, path: str) -> None:
    auto = {"truncation": "auto"} if path == CHAT else {}
    for messages in ([turn("x" * 600)], [*history(3), turn("x" * 600)]):
        for limit in ({}, {"max_tokens": 5} if path == CHAT else {"options": {"num_predict": 5}}):
            message = await refused(service, path, {"messages": messages, **auto, **limit})
            assert ("at most 511 are allowed" if path == CHAT else "at most 511 tokens. Given: 6") in message
    assert not service.engine.streams


async def test_ollama_leaves_out_turns_unless_told_otherwise(service: Service) -> None:
    for told in ({}, {"truncate": True}, {"truncate": None}, {"shift": False}):
        reply = await ollama(service, history(20), **told)
        assert KEPT - 60 < reply["prompt_eval_count"] <= KEPT
        assert prompt_text(service.engine).startswith("[system]S</s>[user]")
        assert prompt_text(service.engine).endswith("[user]Last</s>[assistant]")
    assert "prompt too long" in await refused(service, OLLAMA, {"messages": history(20), "truncate": False})
    assert "`shift` is not supported: leave it out, or set it to false. Given: True" in await refused(
        service, OLLAMA, {"messages": history(1), "shift": True}
    )


async def test_ollamas_num_ctx_limits_the_prompt(service: Service) -> None:
    reply = await ollama(service, history(4), options={"num_ctx": 200})
    assert 90 < reply["prompt_eval_count"] <= 150
    assert (await ollama(service, history(4)))["prompt_eval_count"] > 200
    fits = await ollama(service, history(2), options={"num_ctx": 200})
    assert 150 < fits["prompt_eval_count"] <= 200, "nothing has to go"
    # The last turn alone may be longer, as long as it fits the context that is served.
    assert (await ollama(service, [turn("x" * 300)], options={"num_ctx": 200}))["prompt_eval_count"] > 300
    body = {"messages": history(4), "options": {"num_ctx": 200}, "truncate": False}
    assert "`messages` must have at most 200 tokens" in await refused(service, OLLAMA, body)


async def test_a_generation_of_ollama_ends_at_the_end_of_the_context(service: Service) -> None:
    service.engine.script = count_up
    reply = await ollama(service, history(20), options={"num_predict": 5000})
    assert reply["prompt_eval_count"] + reply["eval_count"] == 512
    assert reply["done_reason"] == "length"


async def test_anthropics_messages_are_refused(service: Service) -> None:
    messages = history(20)[1:]
    assert "prompt is too long" in await refused(service, "/v1/messages", {"messages": messages, "max_tokens": 8})
    assert "truncation" in await refused(service, CHAT, {"messages": messages, "truncation": "always"})
