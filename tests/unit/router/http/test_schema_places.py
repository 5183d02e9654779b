"""Errors of schemas name the field in which the client wrote them, in the words of its dialect."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.constraint import Constraint
from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import MODEL, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
GOOD = {"type": "object", "properties": {"a": {"type": "string", "format": "password"}}}
REFUSED = {"type": "object", "properties": {"a": {"type": "string", "not": {}}}}
REASON = "`properties.a.not`: it cannot be enforced"

GEMINI = "/v1beta/models/toy:generateContent"
TEMPLATE = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=4096))


def function(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def tools_of(path: str, schema: Any) -> dict[str, Any]:
    """Return fields with two tools, one of which must be called; the last one has ``schema``."""
    match path:
        case "/v1/chat/completions":
            return {"tools": [function("f", GOOD), function("g", schema)], "tool_choice": "required"}
        case "/v1/responses":
            tools = [
                {"type": "web_search"},
                {"type": "function", "name": "f", "parameters": GOOD},
                {"type": "function", "name": "g", "parameters": schema},
            ]
            allowed = [{"type": "function", "name": "g"}]
            return {"tools": tools, "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": allowed}}
        case "/v1/messages":
            tools = [{"name": "f", "input_schema": GOOD}, {"name": "g", "input_schema": schema}]
            return {"tools": tools, "tool_choice": {"type": "any"}}
        case path if path == GEMINI:
            declared = [{"name": "f", "parameters": GOOD}, {"name": "g", "parametersJsonSchema": schema}]
            tools = [{"googleSearch": {}}, {"functionDeclarations": declared}]
            return {"tools": tools, "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}
        case _:
            # Ollama has no choice of tools: beside a format, calls match their schemas.
            return {"tools": [function("f", GOOD), function("g", schema)], "format": GOOD}


def format_of(path: str, schema: Any) -> dict[str, Any]:
    match path:
        case "/v1/chat/completions":
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
        case "/v1/responses":
            return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
        case "/v1/messages":
            return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        case path if path == GEMINI:
            return {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": schema}}
        case _:
            return {"format": schema}


TOOLS = {
    "/v1/chat/completions": "tools[1].function.parameters",
    "/v1/responses": "tools[2].parameters",
    "/v1/messages": "tools[1].input_schema",
    GEMINI: "tools[1].functionDeclarations[1].parametersJsonSchema",
    "/api/chat": "tools[1].function.parameters",
}
FORMATS = {
    "/v1/chat/completions": "response_format",
    "/v1/responses": "text.format",
    "/v1/messages": "output_config.format",
    GEMINI: "generationConfig.responseJsonSchema",
    "/api/chat": "format",
    "/api/generate": "format",
}


async def refused(service: Service, path: str, fields: dict[str, Any]) -> str:
    """Return the message of the error."""
    content: dict[str, Any] = {"input": "hi"} if path == "/v1/responses" else {"messages": HI}
    if path == "/api/generate":
        content = {"prompt": "hi"}
    if path == GEMINI:
        content = {"contents": [{"parts": [{"text": "hi"}]}]}
    sent = {"model": "toy", "max_tokens": 9, **content, **fields}
    if path in {"/v1/responses", GEMINI} or path.startswith("/api"):
        del sent["max_tokens"]
    response = await service.post(path, sent)
    body = await response.json()
    assert response.status == 400, body
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", list(TOOLS))
async def test_a_tool_that_cannot_be_enforced_is_named(service: Service, path: str) -> None:
    message = await refused(service, path, tools_of(path, REFUSED))
    assert f"`{TOOLS[path]}` cannot be enforced: {REASON}" in message


@pytest.mark.parametrize("path", list(TOOLS))
async def test_a_tool_that_shards_refuse_is_named(service: Service, engine: ScriptedEngine, path: str) -> None:
    def problem(constraint: Constraint) -> str | None:
        return "empty regex" if "[a&&b]" in constraint.source else None

    engine.problem = problem
    schema = {"type": "object", "properties": {"b": {"pattern": "[a&&b]"}}}
    assert f"`{TOOLS[path]}` cannot be enforced: empty regex" in await refused(service, path, tools_of(path, schema))


async def test_tools_that_only_together_are_too_much_are_named_together(
    service: Service, engine: ScriptedEngine
) -> None:
    engine.problem = lambda constraint: "too large" if "call_1:" in constraint.source else None
    message = await refused(service, "/v1/chat/completions", tools_of("/v1/chat/completions", GOOD))
    assert message == "Tool error: `tools` cannot be enforced: too large"


@pytest.mark.parametrize("path", list(FORMATS))
async def test_a_format_that_cannot_be_enforced_is_named(service: Service, path: str) -> None:
    message = await refused(service, path, format_of(path, REFUSED))
    assert f"{FORMATS[path]} is not valid: {REASON}" in message


async def test_the_error_of_openai_has_the_field(service: Service) -> None:
    fields = tools_of("/v1/chat/completions", REFUSED)
    response = await service.post("/v1/chat/completions", {"messages": HI, **fields})
    assert (await response.json())["error"]["param"] == "tools[1].function.parameters"
