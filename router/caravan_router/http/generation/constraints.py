"""What a client says its output must match, from whichever field says it, to one constraint that the shards keep to."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from caravan_router.core.constraint import Constraint, ConstraintKind
from caravan_router.core.engine import Engine
from caravan_router.http.generation.constraint_fields import (
    Format,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    StructuredOutputs,
    TextFormat,
)
from caravan_router.http.generation.rules import InvalidGrammarError, TooManyBytesError, TwoConstraintsError
from caravan_router.http.limits import Limits
from caravan_router.http.openai.schema import ConstraintFields

_ANY_OBJECT = '{"type":"object"}'
# What every GBNF grammar has, and no Lark grammar.
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


@dataclass(frozen=True, slots=True)
class FieldConstraint:
    """``field``: where the client wrote it."""

    field: str
    constraint: Constraint


def constraint_of_format(field: str, asked: Format | None, limits: Limits) -> FieldConstraint | None:
    """None where anything goes. Raises ValidationError."""
    match asked:
        case None | TextFormat():
            return None
        case JsonObjectFormat(value=schema):
            return _any_object(field) if schema is None else _schema(field, schema, limits)
        case JsonFormat(value=schema):
            return _schema(field, schema, limits)
        case RegexFormat(value=regex):
            return _text(field, ConstraintKind.REGEX, regex, limits)
        case JsonSchemaFormat(json_schema=openai, value=tgi):
            named = openai or tgi
            if named is None or (openai and tgi):
                raise InvalidGrammarError(field, "it must have either `json_schema` or `value`")
            return _schema(field, named.schema, limits)
        case _:
            assert_never(asked)


def constraint_of_fields(fields: ConstraintFields, limits: Limits) -> FieldConstraint | None:
    """The one constraint of a request to OpenAI's routes; None if there is none. Raises ValidationError."""
    found = list(_constraints(fields, limits))
    if len(found) > 1:
        raise TwoConstraintsError(found[0].field, found[1].field)
    return found[0] if found else None


async def compiled(engine: Engine, asked: FieldConstraint | None) -> Constraint | None:
    """Raises InvalidGrammarError with what the shards find wrong with it, NoShardError."""
    if asked is None:
        return None
    problem = await engine.queries.compile_constraint(asked.constraint)
    if problem is not None:
        raise InvalidGrammarError(asked.field, problem)
    return asked.constraint


def _constraints(fields: ConstraintFields, limits: Limits) -> Iterator[FieldConstraint]:
    if (constraint := constraint_of_format("response_format", fields.response_format, limits)) is not None:
        yield constraint
    outputs = fields.structured_outputs
    yield from _vllm("guided_", _guided(fields), limits)
    if outputs is not None:
        inside = list(_vllm("structured_outputs.", outputs, limits))
        if not inside:
            raise InvalidGrammarError("structured_outputs", "it must have one of its fields")
        yield from inside
    if fields.json_schema is not None:
        yield _schema("json_schema", fields.json_schema, limits)
    # llama-server's clients write "" for none.
    if fields.grammar:
        yield _grammar("grammar", fields.grammar, limits)


def _guided(fields: ConstraintFields) -> StructuredOutputs:
    return StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )


def _vllm(prefix: str, outputs: StructuredOutputs, limits: Limits) -> Iterator[FieldConstraint]:
    """``prefix``: before a field's name."""
    if outputs.json is not None:
        yield _schema(f"{prefix}json", outputs.json, limits)
    if outputs.json_object:
        yield _any_object(f"{prefix}json_object")
    if outputs.regex is not None:
        yield _text(f"{prefix}regex", ConstraintKind.REGEX, outputs.regex, limits)
    if outputs.choice is not None:
        yield _choice(f"{prefix}choice", outputs.choice, limits)
    if outputs.grammar is not None:
        yield _grammar(f"{prefix}grammar", outputs.grammar, limits)


def _any_object(field: str) -> FieldConstraint:
    return FieldConstraint(field, Constraint(ConstraintKind.JSON_SCHEMA, _ANY_OBJECT))


def _schema(field: str, schema: dict[str, Any] | str, limits: Limits) -> FieldConstraint:
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        constraint = _text(field, ConstraintKind.JSON_SCHEMA, text, limits)
        if isinstance(schema, str):
            msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, OverflowError) as error:
        raise InvalidGrammarError(field, str(error)) from error
    except RecursionError as error:
        raise InvalidGrammarError(field, "it is nested too deeply") from error
    return constraint


def _grammar(field: str, grammar: str, limits: Limits) -> FieldConstraint:
    kind = ConstraintKind.GBNF if _GBNF_RULE.search(grammar) else ConstraintKind.LARK
    return _text(field, kind, grammar, limits)


def _choice(field: str, choices: Sequence[str], limits: Limits) -> FieldConstraint:
    if not all(choices) or not choices:
        raise InvalidGrammarError(field, "it must have entries, none of them empty")
    return _text(field, ConstraintKind.REGEX, "|".join(_escaped(choice) for choice in choices), limits)


def _escaped(text: str) -> str:
    return _REGEX_META.sub(r"\\\g<0>", text)


def _text(field: str, kind: ConstraintKind, source: str, limits: Limits) -> FieldConstraint:
    size = len(source.encode())
    if size > limits.max_constraint_bytes:
        raise TooManyBytesError(field, limits.max_constraint_bytes, size)
    return FieldConstraint(field, Constraint(kind, source))
