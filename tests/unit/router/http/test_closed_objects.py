"""Objects whose properties are named have no others, in the schema of every dialect."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import MODEL, ScriptedEngine

SCHEMA = {"type": "object", "properties": {"a": {"anyOf": [{"properties": {"b": {"type": "null"}}}]}}}
CLOSED: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"anyOf": [{"properties": {"b": {"type": "null"}}, "additionalProperties": False}]}},
    "additionalProperties": False,
}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": HI,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 9,
        "messages": HI,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {"model": "toy", "stream": False, "messages": HI, "format": SCHEMA},
    "/api/generate": {"model": "toy", "stream": False, "prompt": "hi", "format": SCHEMA},
    "/completion": {"prompt": "a", "json_schema": SCHEMA},
    "/v1beta/models/toy:generateContent": {
        "contents": [{"parts": [{"text": "hi"}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA},
    },
    "/generate": {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
}


@pytest.fixture
def engine() -> ScriptedEngine:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ScriptedEngine(model=replace(MODEL, chat_template=template, max_sequence_tokens=4096))


@pytest.mark.parametrize("path", [*BODIES])
async def test_objects_are_closed(service: Service, path: str) -> None:
    response = await service.post(path, BODIES[path])
    assert response.status == 200, await response.text()
    source = msgspec.json.encode(CLOSED).decode()
    assert service.engine.spec.constraint == Constraint(ConstraintKind.JSON_SCHEMA, source)
