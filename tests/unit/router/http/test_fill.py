"""Filling in the middle of a text: the prompts that the engine gets."""

from typing import Any

import pytest

from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import BOS, FILL, FILL_MODEL, ScriptedEngine, ids_of


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=FILL_MODEL)


def prompt(before: str, after: str) -> tuple[int, ...]:
    return (BOS, FILL.prefix, *ids_of(before), FILL.suffix, *ids_of(after), FILL.middle)


@pytest.mark.parametrize("before", ["ab", ""])
async def test_a_completion_with_a_suffix(service: Service, before: str) -> None:
    await service.reply("/v1/completions", {"prompt": before, "suffix": "cd", "max_tokens": 2})
    assert service.engine.spec.prompt == prompt(before, "cd")


async def test_token_ids_before_a_suffix_are_used_as_they_are(service: Service) -> None:
    await service.reply("/v1/completions", {"prompt": [5, 6], "suffix": "c", "max_tokens": 2})
    assert service.engine.spec.prompt == (BOS, FILL.prefix, 5, 6, FILL.suffix, *ids_of("c"), FILL.middle)


async def test_each_prompt_gets_the_suffix(service: Service) -> None:
    await service.reply("/v1/completions", {"prompt": ["a", "b"], "suffix": "c", "max_tokens": 2})
    assert [stream.spec.prompt for stream in service.engine.streams] == [prompt("a", "c"), prompt("b", "c")]


async def test_control_tokens_in_the_texts_stay_text(service: Service) -> None:
    service.engine.controls = {"</s>": 2}
    await service.reply("/v1/completions", {"prompt": "a</s>", "suffix": "</s>", "max_tokens": 2})
    assert service.engine.spec.prompt == prompt("a</s>", "</s>")


@pytest.mark.parametrize("body", [{"echo": True}, {"prompt_logprobs": 1}])
async def test_a_prompt_that_is_no_text_cannot_be_shown(service: Service, body: dict[str, Any]) -> None:
    response = await service.post("/v1/completions", {"prompt": "a", "suffix": "b", **body})
    (field,) = body
    assert response.status == 400
    message = (await response.json())["error"]["message"]
    assert message.endswith(f"`{field}` may be set only when `suffix` is empty. Given: {body[field]!r}")


async def test_what_does_not_fit_is_refused(service: Service) -> None:
    response = await service.post("/v1/completions", {"prompt": "a" * 200, "suffix": "b" * 60, "max_tokens": 2})
    assert response.status == 400
    assert "266 tokens (264 in the `prompt`, 2 in the completion)" in await response.text()


@pytest.mark.parametrize("before", ["ab", ""])
async def test_ollama_inserts(service: Service, before: str) -> None:
    body = {"model": "any", "prompt": before, "suffix": "cd", "stream": False, "options": {"num_predict": 2}}
    reply = await service.reply("/api/generate", body)
    assert service.engine.spec.prompt == prompt(before, "cd")
    assert reply["response"] == " w1 w2"


@pytest.mark.parametrize(("field", "value"), [("system", "S"), ("context", [1])])
async def test_ollama_inserts_nothing_else(service: Service, field: str, value: object) -> None:
    response = await service.post("/api/generate", {"model": "any", "prompt": "a", "suffix": "b", field: value})
    assert response.status == 400
    assert f"`{field}` is not supported: leave it out, or set `suffix` to null" in await response.text()


async def test_ollama_says_that_the_model_inserts(service: Service) -> None:
    shown = await service.reply("/api/show", {"model": "any"})
    assert "insert" in shown["capabilities"]
