"""A random schema means the same as a tool's parameters and as the format of an answer, and what it means is right."""

import contextlib
import json
from random import Random

import jsonschema
import pytest

from caravan_dialects.api.generation.constraints import ConstraintReader
from caravan_dialects.api.limits import Limits
from caravan_dialects.chat.closed_schema import closed_schema, json_layout
from caravan_dialects.chat.grammar_terms import json_term
from caravan_dialects.chat.plain_schema import plain_schema
from caravan_dialects.chat.schema_references import UnsupportedSchemaError
from caravan_dialects.chat.tool_format import GENERIC
from caravan_dialects.chat.tool_grammar import tool_constraint
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_shard.constraints.grammar import grammar_text
from caravan_testing.examples import examples
from caravan_testing.random_schemas import Schema, random_keywords, random_parameters
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.tool_families import accepts, compiles, drawn

pytestmark = pytest.mark.examples

_BEFORE, _BEHIND = '{"name": "f", "arguments": ', "}"
# Where texts are longer than this, they end as soon as they can.
_MOST = 1_500


async def call_grammar(schema: Schema) -> str:
    """Return the grammar of a call, with another function beside it whose definitions have the same names."""
    other = {"$ref": "#/$defs/spot", "$defs": {"spot": {"type": "object", "maxProperties": 0}}}
    return (await tool_constraint(ScriptedEngine(), GENERIC, {"f": schema, "g": other}, several=False)).source


async def layout_grammar(schema: Schema) -> str:
    """Return the grammar of an answer in the layout of calls, which it has where it stands beside calls."""
    source = answer_constraint(schema).source
    both = await tool_constraint(ScriptedEngine(), GENERIC, {"g": None}, several=False, answer=source)
    return both.source.replace("start: calls | answer", "start: answer")


def answer_constraint(schema: Schema) -> Constraint:
    found = ConstraintReader(Limits()).schema("response_format", schema).constraint
    assert found.kind is ConstraintKind.JSON_SCHEMA
    return found


@pytest.mark.parametrize("seed", range(examples(120)))
async def test_a_schema_means_the_same_for_a_tool_and_for_an_answer(seed: int) -> None:
    schema = random_parameters(seed)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    call, answer = await call_grammar(schema), grammar_text(answer_constraint(schema))
    arguments = call_arguments(call, seed)
    validator.validate(json.loads(arguments))
    assert accepts(answer, arguments)
    alone = await layout_grammar(schema)
    text = drawn(alone, Random(seed), _MOST)
    validator.validate(json.loads(text))
    assert accepts(call, f"{_BEFORE}{text}{_BEHIND}")
    validator.validate(json.loads(drawn(answer, Random(seed), _MOST)))


def test_what_any_keywords_allow_is_right_and_has_no_dead_end() -> None:
    drawn_from = 0
    for seed in range(examples(1_500)):
        schema = random_keywords(seed)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            plain = plain_schema(schema)
        except UnsupportedSchemaError:
            continue
        if not compiles(json_grammar(plain)):
            continue
        grammar = json_grammar(closed_schema(schema))
        assert compiles(grammar), "closing its objects left nothing that matches"
        drawn_from += 1
        # A dead end leaves a text that is no JSON.
        value = json.loads(drawn(grammar, Random(seed), 200))
        # The validator follows a union that has a reference to itself for ever.
        with contextlib.suppress(RecursionError):
            validator.validate(value)
    assert drawn_from > examples(700)


def json_grammar(schema: Schema) -> str:
    return f"start: {json_term({**schema, 'x-guidance': json_layout(compact=True)})}"


def call_arguments(grammar: str, seed: int) -> str:
    """Return what a random call of ``f`` has."""
    # Bytes are drawn, so that half of the calls are of the other function.
    texts = (drawn(grammar, Random(f"{seed} {attempt}"), _MOST) for attempt in range(64))
    return next(text for text in texts if text.startswith(_BEFORE)).removeprefix(_BEFORE).removesuffix(_BEHIND)
