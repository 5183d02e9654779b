"""The tables of docs/fields.md are true: the server does with each field that clients send what they say."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import sent_fields
from sent_fields import Fate

from caravan_router.http.server.ignored import IGNORED_HEADER
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine, count_up

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": HI, "stream": True}),
    "completions": ("/v1/completions", {"prompt": "hi", "stream": True}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "messages": ("/v1/messages", {"model": "any", "max_tokens": 2, "messages": HI}),
    "gemini": ("/v1beta/models/any:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}),
    "ollama": ("/api/chat", {"model": "any", "messages": HI}),
}
# What objects need beside the field that is sent, by their paths.
REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "tools[]"): TOOL,
    ("messages", "tools[]"): {"name": "f", "input_schema": {"type": "object"}},
    ("messages", "thinking"): {"type": "disabled"},
    ("gemini", "tools[]"): {"functionDeclarations": [{"name": "f"}]},
}
# Values of fields with a type.
VALUES: dict[tuple[str, str], Any] = {
    ("responses", "background"): True,
    ("responses", "max_tool_calls"): 5,
    ("messages", "mcp_servers"): [{"name": "x"}],
    ("messages", "thread"): {"type": "create"},
}
# The header has room for so many.
_AT_A_TIME = 12


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    engine = ScriptedEngine(
        model=replace(CHAT_MODEL, max_sequence_tokens=4096), script=lambda spec: count_up(spec)[-2:]
    )
    async with serving(engine) as running:
        yield running


def body_with(dialect: str, paths: Sequence[str]) -> dict[str, Any]:
    """Return a body that has the fields at ``paths``."""
    body = dict(ROUTES[dialect][1])
    for path in paths:
        place, whole = body, ""
        *parents, last = path.split(".")
        for parent in parents:
            whole = f"{whole}.{parent}".removeprefix(".")
            name = parent.removesuffix("[]")
            inner = dict(REQUIRED.get((dialect, whole), {}))
            if parent.endswith("[]"):
                place[name] = [dict(place[name][0])] if name in place else [inner]
                place = place[name][0]
            else:
                place = place.setdefault(name, inner)
        place[last] = VALUES.get((dialect, path), "x")
    return body


def shown(path: str) -> str:
    return path.replace("[]", "[0]")


@pytest.mark.parametrize("dialect", sent_fields.BODIES)
async def test_ignored_fields_are_named_in_the_header(service: Service, dialect: str) -> None:
    paths = [path for path, fate in sent_fields.fates(dialect).items() if fate is Fate.IGNORED]
    for first in range(0, len(paths), _AT_A_TIME):
        sent = paths[first : first + _AT_A_TIME]
        response = await service.post(ROUTES[dialect][0], body_with(dialect, sent))
        text = await response.text()
        assert response.status == 200, text
        assert set(response.headers[IGNORED_HEADER].split(", ")) == set(map(shown, sent))


@pytest.mark.parametrize("dialect", sent_fields.BODIES)
async def test_refused_fields_are_refused_by_name(service: Service, dialect: str) -> None:
    for path, fate in sent_fields.fates(dialect).items():
        if fate is Fate.REFUSED:
            response = await service.post(ROUTES[dialect][0], body_with(dialect, [path]))
            assert response.status == 400, path
            assert f"`{shown(path)}`" in await response.text()


@pytest.mark.parametrize("dialect", sent_fields.BODIES)
async def test_honored_fields_may_be_null(service: Service, dialect: str) -> None:
    nulls = {
        path: None for path, fate in sent_fields.fates(dialect).items() if fate is Fate.HONORED and "." not in path
    }
    response = await service.post(ROUTES[dialect][0], nulls | ROUTES[dialect][1])
    text = await response.text()
    assert response.status == 200, text
    assert IGNORED_HEADER not in response.headers


def test_all_senders_have_versions() -> None:
    for dialect in sent_fields.BODIES:
        for sender, paths in sent_fields.recorded(dialect).items():
            assert paths
            assert any(character.isdigit() for character in sender) or "clients" in sender
