"""Priority, timeout and cache salt, which every generating route accepts as fields or headers."""

import math
from typing import Any

import pytest

from caravan_scheduler.core.errors import DeadlineError, QueueTimeoutError
from caravan_scheduler.core.generation import ANYONE, GenerationSpec
from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import Step, word

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 2, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_fields_reach_the_engine(service: Service, path: str, body: dict[str, Any]) -> None:
    fields = {"priority": 7, "timeout": 2.5, "cache_salt": "mine"}
    response = await service.post(path, body | fields)
    assert response.status == 200, await response.text()
    await response.text()
    for stream in service.engine.streams:
        spec = stream.spec
        assert (spec.priority, spec.timeout_s, spec.namespace, spec.tenant) == (7, 2.5, "\0mine", ANYONE)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_defaults_reach_the_engine(service: Service, path: str, body: dict[str, Any]) -> None:
    await (await service.post(path, body)).text()
    spec = service.engine.spec
    assert (spec.priority, spec.timeout_s, spec.namespace, spec.tenant) == (0, math.inf, "\0", ANYONE)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_headers_replace_fields_and_fields_win(service: Service, path: str, body: dict[str, Any]) -> None:
    await (await service.post(path, body, X_Priority="-3", X_Request_Timeout="1.5")).text()
    assert (service.engine.spec.priority, service.engine.spec.timeout_s) == (-3, 1.5)
    both = body | {"priority": 0, "timeout": 9}
    await (await service.post(path, both, X_Priority="-3", X_Request_Timeout="1.5")).text()
    assert (service.engine.spec.priority, service.engine.spec.timeout_s) == (0, 9.0)


@pytest.mark.parametrize(
    ("fields", "headers", "param", "message"),
    [
        ({"priority": 101}, {}, "priority", "`priority` must be >= -100 and <= 100. Given: 101"),
        ({"priority": -101}, {}, "priority", "`priority` must be >= -100 and <= 100. Given: -101"),
        ({"priority": 1.5}, {}, "priority", "Expected `int | null`, got `float` - at `$.priority`"),
        ({"timeout": 0}, {}, "timeout", "`timeout` must be strictly positive. Given: 0.0"),
        ({"cache_salt": ""}, {}, "cache_salt", "`cache_salt` must have 1 to 256 bytes. Given: 0"),
        ({"cache_salt": "é" * 129}, {}, "cache_salt", "`cache_salt` must have 1 to 256 bytes. Given: 258"),
        ({}, {"X_Priority": "101"}, "X-Priority", "`X-Priority` must be >= -100 and <= 100. Given: 101"),
        ({}, {"X_Priority": "high"}, "X-Priority", "header `X-Priority` must be a whole number. Given: 'high'"),
        (
            {"priority": 1},
            {"X_Priority": "1_0"},
            "X-Priority",
            "header `X-Priority` must be a whole number. Given: '1_0'",
        ),
        (
            {},
            {"X_Request_Timeout": "0"},
            "X-Request-Timeout",
            "`X-Request-Timeout` must be strictly positive. Given: 0.0",
        ),
        (
            {"timeout": 1},
            {"X_Request_Timeout": "nan"},
            "X-Request-Timeout",
            "header `X-Request-Timeout` must be seconds as a decimal number. Given: 'nan'",
        ),
    ],
)
async def test_values_out_of_range_are_refused(
    service: Service, fields: dict[str, Any], headers: dict[str, str], param: str, message: str
) -> None:
    response = await service.post("/v1/completions", {"prompt": "a"} | fields, **headers)
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["param"], error["message"]) == (param, f"Input validation error: {message}")
    response = await service.post("/generate", {"inputs": "a"} | fields, **headers)
    assert response.status == 422
    assert await response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}
    assert not service.engine.streams


FAILURES = [
    (QueueTimeoutError("no turn within 5 s"), 429, "overloaded", "queue_timeout"),
    (DeadlineError("not done within 1 s"), 504, "deadline_exceeded", "deadline"),
]


@pytest.mark.parametrize(("error", "status", "code", "metric"), FAILURES)
async def test_a_timeout_has_a_status(
    service: Service, error: QueueTimeoutError | DeadlineError, status: int, code: str, metric: str
) -> None:
    service.engine.script = lambda _: [error]
    tgi = await service.post("/generate", {"inputs": "a"})
    openai = await service.post("/v1/completions", {"prompt": "a"})
    assert tgi.status == openai.status == status
    assert (await tgi.json())["error_type"] == (await openai.json())["error"]["code"] == code
    assert str(error) in (await tgi.json())["error"]
    assert tgi.headers.get("Retry-After") == ("1" if status == 429 else None)
    assert await service.sample(f'tgi_request_failure{{err="{metric}"}}') == 2


@pytest.mark.parametrize(("error", "status", "code", "metric"), FAILURES)
async def test_a_timeout_in_a_started_stream_is_an_event(
    service: Service, error: QueueTimeoutError | DeadlineError, status: int, code: str, metric: str
) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        return [word("a"), error]

    service.engine.script = script
    *_, last = events(await (await service.post("/generate_stream", {"inputs": "a"})).text())
    assert last["error_type"] == code
    body = {"prompt": "a", "n": 2, "stream": True}
    *_, last, done = events(await (await service.post("/v1/completions", body)).text())
    assert (last["error"]["code"], done) == (code, "[DONE]")
    assert await service.sample(f'tgi_request_failure{{err="{metric}"}}') == 3
