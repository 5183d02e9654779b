"""Writes each kind of constraint in llguidance's own notation."""

import json
from typing import Any

from llguidance import regex_to_lark

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_shard.constraints.gbnf import lark_from_gbnf

# Where only one text is allowed, the model still chooses the tokens for it. Forcing them would tokenize that text again
# at each step, which is slow for a long one.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# White space between the parts of a JSON text: none, a space, or a line break with some indentation. Without a limit,
# small models write line breaks for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
_JSON_OPTIONS_KEY = "x-guidance"


def grammar_text(constraint: Constraint) -> str:
    """Return the text for LLMatcher; raises ValueError with a sentence for the client.

    LLMatcher finds the errors that are not found here.
    """
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_schema(source)
        case ConstraintKind.REGEX:
            return _join(_lark(f"start: /{regex_to_lark(source)}/"))
        case ConstraintKind.LARK:
            return _join(_lark(source))
        case ConstraintKind.GBNF:
            return _join(_lark(lark_from_gbnf(source)))


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object")
    if _JSON_OPTIONS_KEY in schema:
        raise ValueError(f"{_JSON_OPTIONS_KEY} is not supported")
    return _join(_lark("start: @body"), {"name": "body", "json_schema": schema | {_JSON_OPTIONS_KEY: _JSON_OPTIONS}})


def _lark(source: str) -> dict[str, Any]:
    # The options come last, so that the line numbers in llguidance's errors are those of the source.
    return {"lark_grammar": source + _OPTIONS}


def _join(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})
