"""Reads the constraint on the output from a request, for the shards to enforce."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from caravan_dialects.api.generation.rules import TooManyBytesError, invalid_grammar_error
from caravan_dialects.api.generation.schema import (
    Format,
    JsonFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    TextFormat,
)
from caravan_dialects.api.limits import Limits
from caravan_dialects.chat.closed_schema import closed_schema
from caravan_dialects.chat.schema_references import UnsupportedSchemaError
from caravan_dialects.chat.schema_values import ends_in_escape
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_scheduler.core.engine import Engine

_ANY_OBJECT = '{"type":"object"}'
# Every GBNF grammar has a line with ``::=``, and no Lark grammar has one.
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


@dataclass(frozen=True, slots=True)
class FieldConstraint:
    """A constraint and the ``field`` in which the client wrote it."""

    field: str
    constraint: Constraint


class ConstraintReader:
    """Reads constraints from the forms that clients write. Every method raises a ValidationError."""

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.max_constraint_bytes

    def response_format(self, field: str, asked: Format | None) -> FieldConstraint | None:
        """Read OpenAI's ``response_format`` or TGI's ``grammar``; None if any text will do."""
        match asked:
            case None | TextFormat():
                return None
            case JsonObjectFormat(value=of_tgi, schema=of_llama):
                if of_tgi is not None and of_llama is not None:
                    raise invalid_grammar_error(field, "it must have only one of `schema` and `value`")
                schema = of_llama if of_tgi is None else of_tgi
                return self.any_object(field) if schema is None else self.schema(field, schema)
            case JsonFormat(value=schema):
                return self.schema(field, schema)
            case RegexFormat(value=regex):
                return self.regex(field, regex)
            case JsonSchemaFormat(json_schema=openai, value=tgi, schema=plain):
                schemas = [named.schema for named in (openai, tgi) if named is not None]
                schemas += [] if plain is None else [plain]
                if len(schemas) != 1:
                    raise invalid_grammar_error(field, "it must have one of `json_schema`, `value` and `schema`")
                return self.schema(field, schemas[0])
            case _:
                assert_never(asked)

    def any_object(self, field: str) -> FieldConstraint:
        """Accept any JSON object."""
        return FieldConstraint(field, Constraint(ConstraintKind.JSON_SCHEMA, _ANY_OBJECT))

    def schema(self, field: str, schema: dict[str, Any] | str) -> FieldConstraint:
        """Read a JSON schema, as an object or as JSON text, and close its objects.

        What constrains nothing does not count towards its size.
        """
        try:
            if isinstance(schema, str):
                schema = msgspec.json.decode(schema, type=dict[str, Any])
            text = msgspec.json.encode(closed_schema(schema)).decode()
        except (msgspec.DecodeError, OverflowError, UnsupportedSchemaError) as error:
            raise invalid_grammar_error(field, str(error)) from error
        except RecursionError as error:
            raise invalid_grammar_error(field, "it is nested too deeply") from error
        return self._text(field, ConstraintKind.JSON_SCHEMA, text)

    def regex(self, field: str, regex: str) -> FieldConstraint:
        """Read a regular expression in Rust's syntax."""
        if ends_in_escape(regex):
            raise invalid_grammar_error(field, "it ends with a backslash that escapes nothing")
        return self._text(field, ConstraintKind.REGEX, regex)

    def grammar(self, field: str, grammar: str) -> FieldConstraint:
        """Read a grammar: GBNF if a line has ``::=``, else llguidance's dialect of Lark."""
        kind = ConstraintKind.GBNF if _GBNF_RULE.search(grammar) else ConstraintKind.LARK
        return self._text(field, kind, grammar)

    def choice(self, field: str, choices: Sequence[str]) -> FieldConstraint:
        """Read a list of texts, of which the output must be one."""
        if not all(choices) or not choices:
            raise invalid_grammar_error(field, "it must have entries, none of them empty")
        escaped = (_REGEX_META.sub(r"\\\g<0>", choice) for choice in choices)
        return self.regex(field, "|".join(escaped))

    def _text(self, field: str, kind: ConstraintKind, source: str) -> FieldConstraint:
        size = len(source.encode())
        if size > self._max_bytes:
            raise TooManyBytesError(field, self._max_bytes, size)
        return FieldConstraint(field, Constraint(kind, source))


async def compiled(engine: Engine, asked: FieldConstraint | None) -> Constraint | None:
    """Have the shards compile a constraint. Raises ValidationError with what they find wrong, NoShardError."""
    if asked is None:
        return None
    problem = await engine.queries.compile_constraint(asked.constraint)
    if problem is not None:
        raise invalid_grammar_error(asked.field, problem)
    return asked.constraint
