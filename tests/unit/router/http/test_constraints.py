"""Constraints on the output: the engine gets the same constraint from every form of request."""

from typing import Any

import msgspec
import pytest

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_testing.http_server import Service

JSON, REGEX, LARK, GBNF = ConstraintKind
PLAIN = {"type": "object", "properties": {"ä": {"enum": [1.5, None]}}}
SCHEMA = {**PLAIN, "title": "left out", "$defs": {}}
TEXT = msgspec.json.encode({**PLAIN, "additionalProperties": False}).decode()

FORMATS: list[tuple[Any, ConstraintKind, str]] = [
    ({"type": "json", "value": SCHEMA}, JSON, TEXT),
    ({"type": "json", "value": '{"minimum": 1}'}, JSON, '{"minimum":1}'),
    ({"type": "json_object", "value": SCHEMA}, JSON, TEXT),
    ({"type": "json_object"}, JSON, '{"type":"object"}'),
    ({"type": "json_schema", "value": {"schema": SCHEMA}}, JSON, TEXT),
    ({"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, JSON, TEXT),
    ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}, JSON, TEXT),
    ({"type": "regex", "value": "a+"}, REGEX, "a+"),
]
FIELDS: list[tuple[dict[str, Any], ConstraintKind, str]] = [
    *(({"response_format": given}, kind, source) for given, kind, source in FORMATS),
    ({"guided_json": SCHEMA}, JSON, TEXT),
    ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, JSON, TEXT),
    ({"guided_regex": ""}, REGEX, ""),
    ({"guided_choice": ["yes", "no. (not)"]}, REGEX, r"yes|no\. \(not\)"),
    ({"guided_grammar": 'start: "::="'}, LARK, 'start: "::="'),
    ({"guided_grammar": 'root ::= "a"'}, GBNF, 'root ::= "a"'),
    ({"structured_outputs": {"json": SCHEMA}}, JSON, TEXT),
    ({"structured_outputs": {"json_object": True}}, JSON, '{"type":"object"}'),
    ({"structured_outputs": {"regex": "a|b"}}, REGEX, "a|b"),
    ({"structured_outputs": {"choice": ["a"]}}, REGEX, "a"),
    ({"structured_outputs": {"grammar": "start: /a/"}}, LARK, "start: /a/"),
    ({"grammar": "# x\n root ::= y\ny ::= [a]"}, GBNF, "# x\n root ::= y\ny ::= [a]"),
    ({"json_schema": {}}, JSON, "{}"),
]


@pytest.mark.parametrize(("fields", "kind", "source"), FIELDS)
async def test_constraints_of_completions(
    service: Service, fields: dict[str, Any], kind: ConstraintKind, source: str
) -> None:
    response = await service.post("/v1/completions", {"prompt": ["a", "b"], "n": 2, **fields})
    assert response.status == 200, await response.text()
    assert [stream.spec.constraint for stream in service.engine.streams] == [Constraint(kind, source)] * 4


@pytest.mark.parametrize(("given", "kind", "source"), FORMATS)
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/"])
async def test_constraints_of_tgi(service: Service, path: str, given: Any, kind: ConstraintKind, source: str) -> None:
    response = await service.post(path, {"inputs": "a", "parameters": {"grammar": given}})
    assert response.status == 200, await response.text()
    await response.text()
    assert service.engine.spec.constraint == Constraint(kind, source)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"grammar": ""}])
async def test_requests_without_a_constraint_compile_nothing(service: Service, fields: dict[str, Any]) -> None:
    service.engine.problem = lambda _: "nothing should be compiled"
    assert (await service.post("/v1/completions", {"prompt": "a", **fields})).status == 200
    assert (await service.post("/generate", {"inputs": "a", "parameters": {"grammar": None}})).status == 200
    assert {stream.spec.constraint for stream in service.engine.streams} == {None}


async def test_a_constraint_that_does_not_compile_is_refused_with_the_reason(service: Service) -> None:
    service.engine.problem = lambda constraint: f"bad {constraint.kind.value}" + "!" * 1000
    tgi = await service.post("/generate", {"inputs": "a", "parameters": {"grammar": {"type": "regex", "value": "("}}})
    assert tgi.status == 422
    reply = await tgi.json()
    assert reply["error"].startswith("Input validation error: grammar is not valid: bad regex!!!")
    assert len(reply["error"]) < 400
    openai = await service.post("/v1/completions", {"prompt": "a", "structured_outputs": {"json": {}}})
    assert openai.status == 400
    error = (await openai.json())["error"]
    assert (error["param"], error["type"]) == ("structured_outputs.json", "invalid_request_error")
    assert error["message"].startswith("Input validation error: structured_outputs.json is not valid: bad json_schema!")
    assert not service.engine.streams


async def test_the_prompt_is_checked_before_the_constraint_is_compiled(service: Service) -> None:
    service.engine.problem = lambda _: "it was compiled"
    response = await service.post("/v1/completions", {"prompt": [1] * 300, "guided_regex": "a"})
    assert (await response.json())["error"]["param"] == "prompt"


async def test_annotations_do_not_count_towards_the_size_of_a_schema(service: Service) -> None:
    schema = {"type": "object", "description": "d" * 70_000, "default": {"a": ["x" * 70_000]}}
    response = await service.post("/v1/completions", {"prompt": "a", "guided_json": schema})
    assert response.status == 200, await response.text()
    assert service.engine.spec.constraint == Constraint(JSON, '{"type":"object"}')
    response = await service.post("/v1/completions", {"prompt": "a", "guided_json": {"const": "x" * 70_000}})
    assert "must have at most 65536 bytes" in (await response.json())["error"]["message"]
