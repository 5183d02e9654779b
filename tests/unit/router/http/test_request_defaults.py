"""Requests that do not say how to sample get what the model's file or the operator says, on every route but TGI's."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.sampling import DEFAULTS, SamplingParams, defaults_for, valid_defaults
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

RECOMMENDED = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 7}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(CHAT_MODEL, request_defaults=valid_defaults(RECOMMENDED)))


def sampled(params: SamplingParams) -> dict[str, Any]:
    """Return what is not at its default, except the seed."""
    return {name: value for name in DEFAULTS if name != "seed" and (value := getattr(params, name)) != DEFAULTS[name]}


async def got(service: Service, path: str) -> Any:
    async with service.client.get(path) as response:
        return await response.json()


OF_MODEL = {name: value for name, value in RECOMMENDED.items() if name != "max_tokens"} | {"repeat_last_n": 64}


@pytest.mark.parametrize(
    ("path", "body", "also"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, {}),
        ("/v1/completions", {"prompt": "hi"}, {}),
        ("/v1/responses", {"input": "hi"}, {}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 7, "model": "m"}, {}),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}, {}),
        ("/api/generate", {"model": "m", "prompt": "hi", "stream": False}, {}),
        ("/api/chat", {"model": "m", "messages": MESSAGES, "stream": False}, {}),
        # Where the model says nothing, llama-server's own defaults hold.
        ("/completion", {"prompt": "hi"}, {"min_p": 0.05, "samplers": None}),
    ],
)
async def test_each_dialect_uses_them(
    engine: ScriptedEngine, service: Service, path: str, body: dict[str, Any], also: dict[str, Any]
) -> None:
    await service.reply(path, body)
    [spec] = [stream.spec for stream in engine.streams]
    found = sampled(spec.sampling)
    if "samplers" in also:
        also = {**also, "samplers": found["samplers"]}
    assert found == OF_MODEL | also
    assert spec.stopping.max_new_tokens == 7


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 1, "top_k": -1, "max_tokens": 3}),
        ("/completion", {"prompt": "hi", "temperature": 1, "top_k": 0, "n_predict": 3}),
        (
            "/api/generate",
            {
                "model": "m",
                "prompt": "hi",
                "stream": False,
                "options": {"temperature": 1, "top_k": 0, "num_predict": 3},
            },
        ),
    ],
)
async def test_requests_prevail(engine: ScriptedEngine, service: Service, path: str, body: dict[str, Any]) -> None:
    await service.reply(path, body)
    [spec] = [stream.spec for stream in engine.streams]
    assert (spec.sampling.temperature, spec.sampling.top_k, spec.stopping.max_new_tokens) == (1.0, 0, 3)
    assert (spec.sampling.top_p, spec.sampling.repetition_penalty) == (0.9, 1.1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": "hi", "n_predict": -1}),
        ("/api/generate", {"model": "m", "prompt": "hi", "stream": False, "raw": True, "options": {"num_predict": -1}}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": -1}),
    ],
)
async def test_all_that_fits_can_be_asked_for(
    engine: ScriptedEngine, service: Service, path: str, body: dict[str, Any]
) -> None:
    await service.reply(path, body)
    [spec] = [stream.spec for stream in engine.streams]
    assert spec.stopping.max_new_tokens == 256 - len(spec.prompt)


async def test_tgi_stays_greedy(engine: ScriptedEngine, service: Service) -> None:
    await service.reply("/generate", {"inputs": "hi", "parameters": {}})
    await service.reply("/generate", {"inputs": "hi", "parameters": {"do_sample": True}})
    greedy, free = [stream.spec for stream in engine.streams]
    assert (sampled(greedy.sampling), sampled(free.sampling)) == ({"temperature": 0.0}, {})
    assert greedy.stopping.max_new_tokens == 7


async def test_a_beam_search_samples_nothing(engine: ScriptedEngine, service: Service) -> None:
    await service.post("/v1/completions", {"prompt": "hi", "use_beam_search": True, "n": 2, "max_tokens": 3})
    assert [stream.spec for stream in engine.streams]
    assert all(set(sampled(spec.sampling)) <= {"temperature"} for spec in [stream.spec for stream in engine.streams])


async def test_choices_have_their_own(engine: ScriptedEngine, service: Service) -> None:
    choices = [{}, {"temperature": 0.2}, {"samplers": ["top_p", "temperature"]}]
    await service.reply("/v1/chat/completions", {"messages": MESSAGES, "choice_parameters": choices, "n": 3})
    first, cool, fewer = (stream.spec.sampling for stream in engine.streams)
    assert (first.temperature, cool.temperature, cool.top_k) == (0.6, 0.2, 20)
    assert (fewer.top_p, fewer.top_k, fewer.repetition_penalty) == (0.9, 0, 1.0), "what is left out is off"


async def test_clients_can_see_them(service: Service) -> None:
    info = await got(service, "/info")
    assert info["request_defaults"] == {**RECOMMENDED, "repeat_last_n": 64}
    params = (await got(service, "/props"))["default_generation_settings"]["params"]
    assert {name: params[name] for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")} == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1
    }  # fmt: skip
    assert (params["repeat_last_n"], params["n_predict"]) == (64, 7)


async def test_without_any_each_dialect_has_its_own() -> None:
    async with serving(engine := ScriptedEngine(model=CHAT_MODEL)) as service:
        params = (await got(service, "/props"))["default_generation_settings"]["params"]
        assert (params["temperature"], params["top_k"], params["n_predict"]) == (0.8, 40, -1)
        assert (await got(service, "/info"))["request_defaults"] == {}
        await service.reply("/v1/chat/completions", {"messages": MESSAGES})
        await service.reply("/api/chat", {"model": "m", "messages": MESSAGES, "stream": False})
        chat, ollama = (stream.spec.sampling for stream in engine.streams)
        assert sampled(chat) == {}
        assert sampled(ollama) == {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


def test_what_no_request_could_send_is_dropped() -> None:
    given = {"temperature": -1.0, "top_k": 40.0, "top_p": 0.0, "min_p": 0.5, "seed": 4.0, "max_tokens": 0.0, "x": 1.0}
    assert valid_defaults(given) == (("min_p", 0.5), ("top_k", 40))
    assert valid_defaults({"repeat_last_n": -1.0, "repetition_penalty": 1.2}) == (
        ("repeat_last_n", -1),
        ("repetition_penalty", 1.2),
    )


def test_filters_have_no_defaults_beside_mirostat() -> None:
    defaults = valid_defaults({"temperature": 0.5, "top_k": 40, "top_p": 0.9, "xtc_probability": 0.5})
    assert defaults_for({"mirostat": 2}, defaults) == {"temperature": 0.5}
    assert defaults_for({}, (*defaults, ("mirostat", 1))) == {"temperature": 0.5, "mirostat": 1}
    assert defaults_for({"mirostat": 0}, (*defaults, ("mirostat", 1))) == dict(defaults)


def test_a_penalty_of_the_request_has_its_own_window() -> None:
    defaults = valid_defaults({"repetition_penalty": 1.1})
    assert defaults_for({"repetition_penalty": 1.3}, defaults) == {}
    assert defaults_for({"repetition_penalty": None}, defaults) == {"repetition_penalty": 1.1, "repeat_last_n": 64}


async def test_responses_say_what_was_used(service: Service) -> None:
    reply = await service.reply("/v1/responses", {"input": "hi"})
    assert (reply["temperature"], reply["top_p"]) == (0.6, 0.9)
    reply = await service.reply("/v1/responses", {"input": "hi", "temperature": 0.1, "top_p": 0.5})
    assert (reply["temperature"], reply["top_p"]) == (0.1, 0.5)
