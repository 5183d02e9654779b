"""Every generating route counts a request that it refuses, in the metrics and against the rate of its key."""

import time
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.keyring import Keyring
from caravan_router.http.app import Access
from caravan_router.http.routes import ROUTES
from caravan_router.http.server.route import GENERATION_ERRORS
from caravan_scheduler.core.generation import Tenant
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, MODEL, ScriptedEngine

_MESSAGES = [{"role": "user", "content": "a"}]
_CHAT = {"messages": _MESSAGES}
_GEMINI: dict[str, Any] = {"contents": [{"parts": [{"text": "a"}]}]}
_GEMINI_REFUSED: tuple[Any, ...] = (
    _GEMINI | {"generationConfig": {"candidateCount": 0}},
    _GEMINI | {"generationConfig": {"temperature": -1}},
    {"contents": []},
)
_GENERATE = {"inputs": "a", "parameters": {"best_of": 0}}
_RATED = ApiKey(digest=digest_of("key"), tenant=Tenant(name="rated"), requests_per_minute=1)

# For each route, bodies that are refused at different stages: before the reply is made, and with the model known.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "/generate": (_GENERATE, {"inputs": "a", "parameters": {"temperature": -1}}),
    "/generate_stream": (_GENERATE, {"inputs": "a", "parameters": {"adapter_id": 1}}),
    "/": (_GENERATE, {"inputs": "a", "parameters": {"top_p": 2}, "stream": False}),
    "/v1/completions": ({"prompt": "a", "n": 0}, {"prompt": "a", "temperature": -1}),
    "/v1/chat/completions": (_CHAT | {"n": 0}, _CHAT | {"temperature": -1}),
    "/v1/responses": (
        {"input": "a", "background": True},
        {"input": "a", "previous_response_id": "resp_none"},
        {"input": "a", "tools": [{"type": "function", "name": ""}]},
        {"input": "a", "temperature": -1},
    ),
    "/chat/completions": (_CHAT | {"n": 0}, _CHAT | {"temperature": -1}),
    "/responses": ({"input": "a", "background": True}, {"input": "a", "temperature": -1}),
    "/v1/messages": (_CHAT | {"max_tokens": 1, "temperature": -1}, _CHAT | {"max_tokens": 0}),
    **{
        f"/{version}/models/{{model}}:{method}": _GEMINI_REFUSED
        for version in ("v1", "v1beta")
        for method in ("generateContent", "streamGenerateContent")
    },
    "/completion": ({"prompt": "a", "n_cmpl": 0}, {"prompt": []}, {"prompt": "a", "top_p": 2}),
    "/completions": ({"prompt": "a", "n_cmpl": 0}, {"prompt": "a", "top_p": 2}),
    "/infill": ({"input_prefix": "a", "input_suffix": "b", "n_cmpl": 0}, {"input_prefix": "a", "input_suffix": "b"}),
    "/api/generate": ({"prompt": "a", "options": {"temperature": -1}}, {"prompt": "a", "options": {"num_ctx": 0}}),
    "/api/chat": (_CHAT | {"options": {"temperature": -1}}, _CHAT | {"options": {"num_predict": -9}}),
    "/invocations": ({}, _GENERATE, _CHAT | {"n": 0}, {"prompt": "a", "n": 0}),
    "/vertex": ({"instances": []}, {"instances": [_GENERATE]}, {"instances": [_CHAT | {"temperature": -1}]}),
}
# What no route can read.
_UNREADABLE: tuple[Any, ...] = ([], {"no_such_field": 1, "messages": 1, "instances": 1, "options": 1, "input": 1})


def test_every_generating_route_is_in_the_table() -> None:
    """Those that take forms have tests of their own, in `test_audio`."""
    generating = [route for route in ROUTES if set(GENERATION_ERRORS) <= set(route.errors) and not route.operator]
    assert {route.path for route in generating if route.form is None} <= set(_REFUSED)


@pytest.mark.parametrize("path", _REFUSED)
async def test_a_refusal_is_a_request_that_failed(service: Service, path: str) -> None:
    service.engine.model = CHAT_MODEL
    for count, body in enumerate((*_REFUSED[path], *_UNREADABLE), 1):
        response = await service.post(path, body)
        # TGI sends some errors as an event of a stream.
        assert 400 <= response.status < 500 or path == "/generate_stream", await response.text()
        assert await service.sample("tgi_request_count") == count, body
        assert await service.sample('tgi_request_failure{err="validation"}') == count, body
    assert not service.engine.streams


@pytest.mark.parametrize("path", _REFUSED)
async def test_a_refusal_costs_the_key_a_request(path: str) -> None:
    for body in (*_REFUSED[path], *_UNREADABLE):
        access = Access(keyring=Keyring([_RATED], time.monotonic()))
        async with serving(ScriptedEngine(model=CHAT_MODEL), access=access) as service:
            first = await service.post(path, body, Authorization="Bearer key")
            assert first.status != 429
            again = await service.post(path, body, Authorization="Bearer key")
            assert again.status == 429, (body, await again.text())
            assert again.headers["Retry-After"]
            assert await service.sample('tgi_request_failure{err="rate_limited"}') == 1
            assert await service.sample("tgi_request_count") == 2


async def test_an_unknown_model_costs_the_key_a_request() -> None:
    engine = ScriptedEngine(expected=("toy",))
    for path, body in (("/generate", {"inputs": "a"}), ("/v1/embeddings", {"input": "a"})):
        access = Access(keyring=Keyring([_RATED], time.monotonic()))
        async with serving(engine, access=access) as service:
            statuses = [
                (await service.post(path, body | {"model": "none"}, Authorization="Bearer key")).status
                for _ in range(2)
            ]
            assert statuses == [404, 429]


async def test_a_refusal_counts_for_the_model_that_the_body_names() -> None:
    engine = ScriptedEngine(others=[ScriptedEngine(model=replace(MODEL, name="other", fingerprint="o" * 16))])
    async with serving(engine) as service:
        await service.post("/v1/completions", {"prompt": "a", "n": 0, "model": "other"})
        await service.post("/v1/completions", {"prompt": "a", "n": 0, "model": "none"})
        assert 'tgi_request_count{model="other"} 1' in (await service.metrics.render()).decode()
        assert await service.sample("tgi_request_count") == 2
