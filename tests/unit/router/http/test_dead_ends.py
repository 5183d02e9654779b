"""An output whose constraint lets nothing follow is an error of the server's own, in every dialect."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_proto.messages.results import FinishReason
from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import MODEL, ScriptedEngine, word

WORDS = "The output cannot go on: after what was generated, its schema, grammar or regular expression lets nothing"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
OPENAI_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "response_format": OPENAI_FORMAT},
    "/v1/chat/completions": {"messages": HI, "response_format": OPENAI_FORMAT},
    "/v1/responses": {"input": "hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 9,
        "messages": HI,
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {"model": "toy", "messages": HI, "format": SCHEMA},
    "/api/generate": {"model": "toy", "prompt": "hi", "format": SCHEMA},
    "/completion": {"prompt": "a", "json_schema": SCHEMA},
    "/generate": {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": SCHEMA}}},
}


@pytest.fixture
def engine() -> ScriptedEngine:
    def failing(_: object) -> list[Any]:
        return [word('{"a":'), word(" 1,"), word("</s>", finish=FinishReason.CONSTRAINT_FAILED, special=True)]

    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return ScriptedEngine(model=replace(MODEL, chat_template=template, max_sequence_tokens=4096), script=failing)


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_whole_reply_is_the_error(service: Service, path: str) -> None:
    whole = {"stream": False} if path.startswith("/api") else {}
    response = await service.post(path, BODIES[path] | whole)
    assert response.status == 500
    assert WORDS in await response.text()
    assert "}" not in (await response.text()).partition(WORDS)[0]


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_stream_ends_with_the_error(service: Service, path: str) -> None:
    name = "/generate_stream" if path == "/generate" else path
    streamed = {} if path == "/generate" else {"stream": True}
    response = await service.post(name, BODIES[path] | streamed)
    text = await response.text()
    assert WORDS in text
    assert '"length"' not in text
    assert "max_tokens" not in text.partition(WORDS)[2]


async def test_the_error_has_a_code_of_its_own(service: Service) -> None:
    response = await service.post("/v1/chat/completions", BODIES["/v1/chat/completions"])
    error = (await response.json())["error"]
    assert (error["code"], error["type"]) == ("constraint_failed", "server_error")
