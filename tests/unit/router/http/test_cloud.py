"""The routes of SageMaker and of Vertex AI."""

import json
from typing import Any

import pytest

from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import CHAT_MODEL, EOS_TOKEN, Pause, word

ONE_TOKEN = {"max_new_tokens": 1}


async def test_invocations_with_inputs_reply_like_the_root(service: Service) -> None:
    body: dict[str, Any] = {"inputs": "a", "parameters": ONE_TOKEN, "priority": 3}
    response = await service.post("/invocations", body)
    assert await response.json() == [{"generated_text": " w1"}]
    assert response.headers["x-generated-tokens"] == "1"
    assert service.engine.spec.priority == 3
    [token] = events(await (await service.post("/invocations", body | {"stream": True})).text())
    assert (token["index"], token["generated_text"]) == (1, " w1")


async def test_invocations_with_a_prompt_reply_with_a_completion(service: Service) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    reply = await (await service.post("/invocations", body)).json()
    assert (reply["object"], reply["choices"][0]["text"]) == ("text_completion", " w1")
    chunk, done = events(await (await service.post("/invocations", body | {"stream": True})).text())
    assert (chunk["choices"][0]["text"], done) == (" w1", "[DONE]")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/invocations", {}, "one of `inputs`, `messages`, `prompt` is needed"),
        ("/invocations", {"inputs": "", "parameters": ONE_TOKEN}, "`inputs` cannot be empty"),
        ("/invocations", {"prompt": "a", "top_p": 2}, "`top_p` must be > 0.0 and <= 1.0. Given: 2.0"),
        ("/invocations", [], "Expected `object`, got `array`"),
        ("/vertex", {}, "Object missing required field `instances`"),
        ("/vertex", {"instances": []}, "`instances` cannot be empty"),
        (
            "/vertex",
            {"instances": [{"inputs": "a"}] * 33},
            "Number of prompts exceeds the maximum allowed batch size of 32. Given: 33",
        ),
        (
            "/vertex",
            {"instances": [{"inputs": "a"}, {"messages": [], "n": 2}]},
            "`instances[1].n` is not supported: leave it out, or set it to null. Given: 2",
        ),
        (
            "/vertex",
            {"instances": [{"messages": [], "stream": True}]},
            "`instances[0].stream` is not supported: leave it out, or set it to null. Given: True",
        ),
        ("/vertex", {"instances": ["a"]}, "Expected `object`, got `str` - at `$.instances[0]`"),
        ("/vertex", {"instances": [{}]}, "Object missing required field `inputs` - at `$.instances[0]`"),
        (
            "/vertex",
            {"instances": [{"messages": [{"role": 5}]}]},
            "Expected `str`, got `int` - at `$.instances[0].messages[0].role`",
        ),
        (
            "/vertex",
            {"instances": [{"inputs": "a", "stream": True}]},
            "`instances[0].stream` is not supported: leave it out, or set it to null. Given: True",
        ),
        (
            "/vertex",
            {"instances": [{"inputs": "a"}, {"inputs": "a", "parameters": {"top_k": 0}}]},
            "`top_k` must be strictly positive. Given: 0",
        ),
    ],
)
async def test_invalid_requests_are_refused(service: Service, path: str, body: Any, message: str) -> None:
    response = await service.post(path, body)
    assert response.status == 422
    assert await response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}
    assert not service.engine.streams


async def test_vertex_returns_a_prediction_for_each_instance(service: Service) -> None:
    instances = [
        {"inputs": "a", "parameters": {"max_new_tokens": 2}},
        {"inputs": "b", "parameters": {"max_new_tokens": 1, "return_full_text": True, "best_of": 2, "do_sample": True}},
        {"inputs": "c", "parameters": ONE_TOKEN, "priority": -5},
    ]
    response = await service.post("/vertex", {"instances": instances})
    assert await response.json() == {"predictions": [" w1 w2", "b w1", " w1"]}
    # All instances are generated together, each with its own priority.
    assert [stream.spec.priority for stream in service.engine.streams] == [0, 0, 0, -5]


async def test_vertex_takes_a_permit_for_each_candidate(service: Service) -> None:
    best_of = {"best_of": 16, "do_sample": True}
    instances = [{"inputs": "a", "parameters": best_of}] * 9
    response = await service.post("/vertex", {"instances": instances})
    assert response.status == 429
    assert (await response.json())["error_type"] == "overloaded"


HI = [{"role": "user", "content": "hi"}]


async def test_both_routes_accept_conversations(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    body: dict[str, Any] = {"messages": HI, "max_tokens": 1}
    reply = await (await service.post("/invocations", body)).json()
    assert (reply["object"], reply["choices"][0]["message"]["content"]) == ("chat.completion", " w1")
    instances = [{"inputs": "a", "parameters": ONE_TOKEN}, body | {"priority": 9}]
    reply = await (await service.post("/vertex", {"instances": instances})).json()
    assert reply == {"predictions": [" w1", " w1"]}
    assert [stream.spec.priority for stream in service.engine.streams] == [0, 0, 9]


async def test_a_prediction_with_tool_calls_is_their_json(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    call = '{"name": "f", "parameters": {"x": 1}}'
    service.engine.script = lambda _: [word(call), EOS_TOKEN]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    instance = {"messages": HI, "tools": tools, "tool_choice": "required"}
    [prediction] = (await (await service.post("/vertex", {"instances": [instance]})).json())["predictions"]
    [made] = json.loads(prediction)
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("f", {"x": 1})


async def test_a_failed_instance_ends_the_others(service: Service) -> None:
    service.engine.script = lambda spec: [word("a"), GenerationError("gone") if len(spec.prompt) == 2 else Pause()]
    response = await service.post("/vertex", {"instances": [{"inputs": "long"}, {"inputs": "a"}]})
    assert response.status == 424
    assert service.is_idle()
