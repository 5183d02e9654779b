"""A whole reply has the text that was generated before the deadline, if the dialect can mark it as incomplete."""

from typing import Any

import pytest

from caravan_scheduler.core.errors import DeadlineError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, Step, word

MESSAGES = [{"role": "user", "content": "hi"}]
LATE = DeadlineError("the request did not end within its timeout")


async def reply(path: str, body: dict[str, Any], *steps: Step) -> tuple[int, Any]:
    async with serving(ScriptedEngine(script=lambda _: steps, model=CHAT_MODEL)) as service:
        response = await service.post(path, body)
        assert service.is_idle()
        return response.status, await response.json()


async def test_generate_returns_the_text_so_far() -> None:
    body = {"inputs": "hi", "parameters": {"details": True}}
    status, answer = await reply("/generate", body, word("a", logprob=-1.0), word("b", logprob=-1.0), LATE)
    assert (status, answer["generated_text"]) == (200, "ab")
    assert (answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) == ("length", 2)


async def test_completions_return_the_text_so_far() -> None:
    status, answer = await reply("/v1/completions", {"prompt": "hi", "stop": "bx"}, word("a"), word("b"), LATE)
    [choice] = answer["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "ab", "length")
    assert answer["usage"]["completion_tokens"] == 2


async def test_chat_returns_the_text_so_far() -> None:
    status, answer = await reply("/v1/chat/completions", {"messages": MESSAGES}, word("a"), LATE)
    [choice] = answer["choices"]
    assert (status, choice["message"]["content"], choice["finish_reason"]) == (200, "a", "length")


@pytest.mark.parametrize(("path", "body"), [("/api/generate", {"prompt": "hi"}), ("/api/chat", {"messages": MESSAGES})])
async def test_ollama_returns_the_text_so_far(path: str, body: dict[str, Any]) -> None:
    status, answer = await reply(path, {"model": "m", "stream": False, **body}, word("a"), LATE)
    assert (status, answer["done"], answer["done_reason"], answer["eval_count"]) == (200, True, "length", 1)
    assert (answer["response"] if "response" in answer else answer["message"]["content"]) == "a"


async def test_messages_return_the_text_so_far_with_what_was_held_back() -> None:
    body = {"model": "m", "max_tokens": 9, "messages": MESSAGES, "stop_sequences": ["bx"]}
    status, answer = await reply("/v1/messages", body, word("a"), word("b"), LATE)
    assert (status, answer["content"][0]["text"], answer["stop_reason"]) == (200, "ab", "max_tokens")


async def test_a_response_has_the_text_so_far() -> None:
    status, answer = await reply("/v1/responses", {"input": "hi"}, word("a"), LATE)
    assert (status, answer["status"], answer["incomplete_details"]) == (
        200,
        "incomplete",
        {"reason": "deadline_exceeded"},
    )
    assert answer["output"][-1]["content"][0]["text"] == "a"


async def test_vertex_cannot_mark_a_prediction_as_incomplete_and_returns_an_error() -> None:
    status, answer = await reply("/vertex", {"instances": [{"inputs": "hi"}]}, word("a"), LATE)
    assert (status, answer["error_type"]) == (504, "deadline_exceeded")


async def test_choices_without_tokens_are_empty_if_another_choice_has_tokens(service: Service) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        return [word("a"), LATE] if not service.engine.streams else [LATE]

    service.engine.script = script
    answer = await (await service.post("/v1/completions", {"prompt": "hi", "n": 2})).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        ("a", "length"),
        ("", "length"),
    ]


async def test_missing_prompt_logprobs_are_an_error() -> None:
    body = {"prompt": ["hi", "ho"], "echo": True, "logprobs": 1}
    status, answer = await reply("/v1/completions", body, LATE)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
