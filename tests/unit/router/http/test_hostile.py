"""Malformed and oversized requests get a 4xx with a JSON error, quickly."""

import gzip
import io
import re
import time
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.limits import Limits
from caravan_router.http.ops import openapi_document
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

JSON = {"Content-Type": "application/json"}
ONE_TOKEN = b'{"inputs":"a","parameters":{"max_new_tokens":1}}'
DEEP = b"[" * 500_000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"inputs":"a"}x', 400),
        (b"\xff\xfe", 400),
        (b'{"inputs":"\xff"}', 400),
        (b'{"inputs":"\\ud800"}', 400),
        (b'{"inputs":"a","parameters":{"temperature":NaN}}', 400),
        (b'{"inputs":"a","parameters":{"temperature":Infinity}}', 400),
        (b'{"inputs":"a","parameters":{"temperature":1e400}}', 422),
        (b'{"inputs":"a","parameters":{"seed":' + b"9" * 10_000 + b"}}", 422),
        (b'{"inputs":"a","parameters":{"seed":1e30}}', 422),
        (b"null", 422),
        (b"[]", 422),
        (b'{"inputs":["a"]}', 422),
        (b'{"inputs":' + DEEP, 400),
        (b'{"inputs":"a","parameters":{"grammar":' + DEEP + b"}}", 400),
        (b'{"inputs":"a","parameters":{"grammar":{"type":"json","value":{"a":' + DEEP + b"}}}}", 400),
        (b'{"inputs":"a","parameters":{"stop":[' + b'"x",' * 10_000 + b'"x"]}}', 422),
    ],
)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_bad_bodies_of_tgi_routes(service: Service, path: str, body: bytes, status: int) -> None:
    response = await service.client.post(path, data=body, headers=JSON)
    text = await response.text()
    # A streaming route reports invalid content as an event, and a malformed body by status.
    assert response.status == status or (path == "/generate_stream" and response.status == 200), text
    assert '"error_type":"validation"' in text
    assert len(text) < 500
    assert not service.engine.streams


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b'{"prompt":"a","logit_bias":' + DEEP + b"}", 400),
        (b'{"prompt":' + DEEP + b"}", 400),
        (b'{"prompt":[' + b"1," * 100_000 + b"1]}", 400),
        (b'{"prompt":"a","temperature":1e400}', 400),
        (b'{"prompt":"a","max_tokens":-2}', 400),
        (b'{"prompt":"a","n":1e9}', 400),
    ],
)
async def test_bad_bodies_of_openai_routes(service: Service, body: bytes, status: int) -> None:
    response = await service.client.post("/v1/completions", data=body, headers=JSON)
    assert response.status == status
    assert (await response.json())["error"]["type"] == "invalid_request_error"
    assert not service.engine.streams


NESTED_RESULT = b'{"type":"tool_result","content":[' * 300 + b"]}" * 300
NESTED_INPUT = b'{"type":"tool_use","name":"f","input":' + b'{"a":' * 80 + b"1" + b"}" * 81


PROMPT_FIELDS = [
    b'"messages":' + DEEP,
    b'"messages":[],"a":' + DEEP,
    b'"messages":[' + b"1," * 100_000 + b"1]",
    b'"messages":[{"role":"user","content":[' + NESTED_RESULT + b"]}]",
    b'"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[' + NESTED_INPUT + b"]}]",
    b'"messages":[{"role":"user","content":[' + b'{"type":"text","text":""},' * 50_000 + b'{"type":"image"}]}]',
    b'"messages":[' + b'{"role":"system","content":"a"},' * 50_000 + b'{"role":"user","content":"a"}]',
    b'"messages":[{"role":"user","content":"\\ud800"}]',
    b'"messages":[{"role":"user","content":"a"}],"system":' + DEEP,
    b'"messages":[{"role":"user","content":"a"}],"tools":[' + b'{"name":"f"},' * 10_000 + b'{"name":"f"}]',
    b'"messages":[{"role":"user","content":"a"}],"thinking":{"type":"enabled","budget_tokens":-1}',
    b",".join([b'"f%d":1' % number for number in range(50_000)]),
]
# Fields that do not decide the prompt.
OTHER_FIELDS = [
    b'"messages":[{"role":"user","content":"a"}],"max_tokens":1e400',
    b'"messages":[{"role":"user","content":"a"}],"max_tokens":' + b"9" * 10_000,
    b'"messages":[{"role":"user","content":"a"}],"stop_sequences":[' + b'"x",' * 10_000 + b'"x"]',
]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *(("/v1/messages", fields) for fields in [*PROMPT_FIELDS, *OTHER_FIELDS]),
        *(("/v1/messages/count_tokens", fields) for fields in PROMPT_FIELDS),
    ],
)
async def test_bad_bodies_of_anthropics_routes(path: str, fields: bytes) -> None:
    engine = ScriptedEngine(model=CHAT_MODEL)
    async with serving(engine) as service:
        body = io.BytesIO(b'{"max_tokens":5,' + fields + b"}")
        response = await service.client.post(path, data=body, headers=JSON)
        assert response.status == 400, await response.text()
        text = await response.text()
        assert '"type":"invalid_request_error"' in text
        assert len(text) < 600
        assert not engine.streams


def gemini_parts(*parts: bytes) -> bytes:
    return b'"contents":[{"parts":[' + b",".join(parts) + b"]}]"


CALL = b'{"functionCall":{"name":"f"}}'
GEMINI_FIELDS = [
    b'"contents":' + DEEP,
    b'"contents":[],"a":' + DEEP,
    b'"contents":[' + b"1," * 100_000 + b"1]",
    gemini_parts(b'{"functionResponse":{"name":"f","response":' + b'{"a":' * 2000 + b"1" + b"}" * 2001 + b"}"),
    b'"contents":[{"role":"model","parts":[{"functionCall":{"name":"f","args":' + b'{"a":' * 80 + b"1" + b"}" * 84,
    b'"contents":[{"role":"model","parts":[' + b",".join([CALL] * 20_000) + b"]}]",
    gemini_parts(b'{"text":"\\ud800"}'),
    gemini_parts(*[b'{"text":"a"}'] * 50_000, b"{}"),
    gemini_parts(b'{"text":"a"}') + b',"systemInstruction":' + DEEP,
    gemini_parts(b'{"text":"a"}')
    + b',"tools":[{"functionDeclarations":['
    + b'{"name":"f"},' * 9999
    + b'{"name":"f"}]}]',
    gemini_parts(b'{"text":"a"}')
    + b',"tools":[{"functionDeclarations":[{"name":"f","parameters":'
    + b'{"items":' * 900
    + b"{}"
    + b"}" * 900
    + b"}]}]",
    gemini_parts(b'{"text":"a"}') + b',"generationConfig":{"responseSchema":' + b'{"items":' * 900 + b"{}" + b"}" * 901,
    gemini_parts(b'{"text":"a"}') + b',"generationConfig":{"maxOutputTokens":' + b"9" * 10_000 + b"}",
    gemini_parts(b'{"text":"a"}') + b',"generationConfig":{"temperature":1e400}',
    gemini_parts(b'{"text":"a"}') + b',"generationConfig":{"candidateCount":1000000000}',
    gemini_parts(b'{"text":"a"}') + b',"generationConfig":{"stopSequences":[' + b'"x",' * 10_000 + b'"x"]}',
]


@pytest.mark.parametrize("fields", GEMINI_FIELDS)
async def test_bad_bodies_of_googles_routes(fields: bytes) -> None:
    engine = ScriptedEngine(model=CHAT_MODEL)
    async with serving(engine) as service:
        path = "/v1beta/models/m:generateContent"
        response = await service.client.post(path, data=io.BytesIO(b"{" + fields + b"}"), headers=JSON)
        text = await response.text()
        assert response.status == 400, text
        assert '"status":"INVALID_ARGUMENT"' in text
        assert len(text) < 600
        assert not engine.streams


MANY_TOOLS = b'"tools":[%b],"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[%b]}' % (
    b",".join(b'{"type":"function","name":"f%d"}' % number for number in range(20_000)),
    b",".join(b'{"name":"f%d"}' % number for number in range(20_000)),
)


# Each namespace has a tool of the same name.
MANY_NAMESPACES = b'"tools":[%b],"tool_choice":{"type":"allowed_tools","mode":"auto","tools":[%b]}' % (
    b",".join(
        b'{"type":"namespace","name":"n%d","tools":[{"type":"function","name":"f"}]}' % number
        for number in range(10_000)
    ),
    b",".join([b'{"name":"f"}'] * 10_000 + [b'{"type":"namespace","name":"n1"}'] * 10_000),
)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", b'{"input":' + DEEP + b"}", 400),
        ("/v1/embeddings", b'{"input":[' + b"1," * 500_000 + b"1]}", 400),
        ("/v1/embeddings", b'{"input":[' + b'"a",' * 100_000 + b'"a"]}', 400),
        ("/v1/embeddings", b'{"input":[' + b"[]," * 100_000 + b"[]]}", 400),
        ("/v1/embeddings", b'{"input":[1e400]}', 400),
        ("/v1/embeddings", b'{"input":"a","dimensions":' + b"9" * 10_000 + b"}", 400),
        ("/v1/completions", b'{"prompt":"a","echo":true,"max_tokens":0,"logprobs":' + b"9" * 400 + b"}", 400),
        ("/v1/completions", b'{"prompt":"a","logit_bias":{"' + b"1" * 100_000 + b'":1}}', 400),
        ("/v1/completions", b'{"prompt":"a","logit_bias":{' + b'"1":1,' * 100_000 + b'"x":1}}', 400),
        ("/v1/completions", b'{"prompt":"a","guided_json":{"a":' + b'{"a":' * 3000 + b"1" + b"}" * 3001 + b"}", 400),
        ("/v1/completions", b'{"prompt":"a","guided_json":"' + b"[" * 60_000 + b'"}', 400),
        ("/v1/completions", b'{"prompt":"a","guided_choice":[' + b'"a",' * 100_000 + b'"a"]}', 400),
        ("/v1/completions", b'{"prompt":"a","guided_regex":"' + b"(" * 70_000 + b'"}', 400),
        ("/v1/completions", b'{"prompt":"a","grammar":"' + b" " * 70_000 + b'"}', 400),
        ("/v1/responses", b'{"input":"a",' + MANY_TOOLS + b"}", 400),
        ("/v1/responses", b'{"input":"a",' + MANY_NAMESPACES + b"}", 400),
        ("/invocations", b'{"inputs":' + DEEP, 400),
        ("/invocations", b'{"inputs":"\\ud800"}', 400),
        ("/invocations", b'{"prompt":1e400}', 422),
        ("/invocations", b'{"a":1}', 422),
        ("/vertex", b'{"instances":' + DEEP, 400),
        ("/vertex", b'{"instances":[' + b"{}," * 100_000 + b"{}]}", 422),
        ("/vertex", b'{"instances":[{"inputs":"\\ud800"}]}', 400),
        ("/vertex", b'{"instances":[{"inputs":"\xff"}]}', 400),
        ("/vertex", b'{"instances":[null]}', 422),
    ],
)
async def test_bad_bodies_of_other_routes(service: Service, path: str, body: bytes, status: int) -> None:
    # CPU time of client and server, which run in this thread: other processes do not count.
    began = time.thread_time()
    response = await service.client.post(path, data=io.BytesIO(body), headers=JSON)
    text = await response.text()
    assert response.status == status, text
    assert '"validation"' in text or '"context_length_exceeded"' in text
    assert len(text) < 600
    assert time.thread_time() - began < 2
    assert not service.engine.streams


def routes_of_bodies() -> list[str]:
    """Return the paths that take JSON, with an id of nothing where one is needed."""
    described = msgspec.json.decode(openapi_document())["paths"]
    return sorted(
        re.sub(r"\{\w+\}", "nothing", path)
        for path, methods in described.items()
        if "application/json" in methods.get("post", {}).get("requestBody", {}).get("content", {})
    )


@pytest.mark.parametrize("path", routes_of_bodies())
async def test_a_name_that_is_not_utf8_is_an_error_of_the_client(service: Service, path: str) -> None:
    response = await service.client.post(path, data=b'{"m\xff":1}', headers=JSON)
    assert 400 <= response.status < 500, await response.text()
    assert not service.engine.streams


@pytest.mark.parametrize(
    "body",
    [b"not gzip", gzip.compress(ONE_TOKEN)[:-9], gzip.compress(ONE_TOKEN) + b"more"],
    ids=["none", "cut", "more"],
)
async def test_a_body_that_cannot_be_decompressed_does_not_spoil_the_next_request(
    service: Service, body: bytes
) -> None:
    for _ in range(5):
        response = await service.client.post("/generate", data=body, headers=JSON | {"Content-Encoding": "gzip"})
        if "could not be decompressed" in await response.text():
            assert (response.status, response.headers["Connection"]) == (400, "close")
        else:
            # Without its end it is no JSON; what follows the end may come later than the reply.
            assert response.status == (200 if body.endswith(b"more") else 400)
            assert body != b"not gzip"
        assert (await service.client.post("/generate", data=ONE_TOKEN, headers=JSON)).status == 200


async def test_a_zero_byte_is_an_ordinary_character(service: Service) -> None:
    response = await service.client.post("/generate", data=b'{"inputs":"a\\u0000b"}', headers=JSON)
    assert response.status == 200
    assert len(service.engine.spec.prompt) == 4


@pytest.mark.parametrize(("path", "key"), [("/generate", "error_type"), ("/v1/completions", "error")])
async def test_a_body_over_the_limit_is_413(service: Service, path: str, key: str) -> None:
    body = io.BytesIO(b'{"inputs":"' + b"a" * 10_000_000 + b'"}')
    response = await service.client.post(path, data=body, headers=JSON)
    assert response.status == 413
    assert key in await response.json()


async def test_the_limit_counts_decompressed_bytes(service: Service) -> None:
    bomb = gzip.compress(b'{"inputs":"' + b"a" * 50_000_000 + b'"}')
    assert len(bomb) < 100_000
    response = await service.client.post("/generate", data=bomb, headers=JSON | {"Content-Encoding": "gzip"})
    assert response.status == 413
    assert "2000000 bytes" in (await response.json())["error"]


async def test_a_small_compressed_body_is_read(service: Service) -> None:
    body = gzip.compress(b'{"inputs":"a","parameters":{"max_new_tokens":1}}')
    response = await service.client.post("/generate", data=body, headers=JSON | {"Content-Encoding": "gzip"})
    assert response.status == 200


async def test_a_body_that_contradicts_its_content_coding_is_400(service: Service) -> None:
    response = await service.client.post("/generate", data=b"{}", headers=JSON | {"Content-Encoding": "gzip"})
    assert response.status == 400
    assert (await response.json())["error_type"] == "validation"


async def test_other_content_types_are_415(service: Service) -> None:
    response = await service.client.post("/generate", data=b"inputs=a", headers={"Content-Type": "text/plain"})
    assert response.status == 415
    assert "text/plain" in (await response.json())["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/nope", 404), ("GET", "/generate", 405), ("DELETE", "/v1/completions", 405)],
)
async def test_unknown_routes_and_methods_are_json(service: Service, method: str, path: str, status: int) -> None:
    response = await service.client.request(method, path)
    body: dict[str, Any] = await response.json()
    assert response.status == status
    assert isinstance(body["error"], dict if path.startswith("/v1") else str)


async def test_a_prompt_of_many_bytes_is_refused_before_it_is_tokenized() -> None:
    engine = ScriptedEngine()
    async with serving(engine, Limits(max_prompt_bytes=10)) as service:
        response = await service.post("/generate", {"inputs": "a" * 11})
        assert "at most 10 bytes. Given: 11" in (await response.json())["error"]
