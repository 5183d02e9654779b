"""What an output must be, and beam searches: what the engine gets, and what is refused."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

MODEL = replace(CHAT_MODEL, eos_token_ids=frozenset({2, 3}), max_top_n_tokens=7)


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


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


PATHS = pytest.mark.parametrize("path", [TEXT, CHAT])


@PATHS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1.0, EarlyStopping.NO)),
        ({"temperature": 0, "length_penalty": -0.5, "early_stopping": True}, (-0.5, EarlyStopping.YES)),
        ({"length_penalty": 0, "early_stopping": "never"}, (0, EarlyStopping.NEVER)),
    ],
)
async def test_a_search_reaches_the_engine_as_a_group(
    path: str, fields: dict[str, Any], expected: tuple[float, EarlyStopping]
) -> None:
    engine = ScriptedEngine(model=MODEL)
    async with serving(engine) as service:
        reply = await service.reply(path, BODIES[path] | {"use_beam_search": True, "n": 3} | fields)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    specs = [stream.spec for stream in engine.streams]
    penalty, early = expected
    assert [spec.beams for spec in specs] == [
        BeamSearch(width=3, index=index, length_penalty=penalty, early_stopping=early, eos_token_ids=frozenset({2, 3}))
        for index in range(3)
    ]
    assert all(spec.sampling.temperature == 0 and spec.max_draft_tokens == 0 for spec in specs)


@PATHS
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stream": True}, "`stream` cannot be used with `use_beam_search`. Given: True"),
        ({"temperature": 0.7}, "`temperature` cannot be used with `use_beam_search`. Given: 0.7"),
        ({"seed": 0}, "`seed` cannot be used with `use_beam_search`. Given: 0"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` cannot be used with `use_beam_search`. Given: 1.1"),
        ({"stop": ["x"]}, "`stop` cannot be used with `use_beam_search`. Given: ['x']"),
        ({"guided_regex": "a+"}, "`guided_regex` cannot be used with `use_beam_search`. Given: 'a+'"),
        ({"length_penalty": 11}, "`length_penalty` must be >= -10.0 and <= 10.0. Given: 11.0"),
        # Two tokens end an output, and a shard returns seven.
        ({"n": 6}, "`n` must be >= 1 and <= 5. Given: 6"),
        (
            {"use_beam_search": False, "early_stopping": True},
            "`early_stopping` may be set only when `use_beam_search` is true. Given: True",
        ),
    ],
)
async def test_other_fields_are_refused_by_name(path: str, fields: dict[str, Any], message: str) -> None:
    async with serving(ScriptedEngine(model=MODEL)) as service:
        response = await service.post(path, BODIES[path] | {"use_beam_search": True, "n": 2} | fields)
        assert response.status == 400
        assert (await response.json())["error"]["message"] == f"Input validation error: {message}"


@pytest.mark.parametrize("field", [{"best_of": 2}, {"echo": True}, {"prompt_logprobs": 0}])
async def test_fields_of_completions_are_refused_by_name(field: dict[str, Any]) -> None:
    async with serving(ScriptedEngine(model=MODEL)) as service:
        response = await service.post(TEXT, BODIES[TEXT] | {"use_beam_search": True, "n": 2} | field)
        assert response.status == 400
        assert f"`{next(iter(field))}` cannot be used" in (await response.json())["error"]["message"]
