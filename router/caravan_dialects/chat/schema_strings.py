"""The rules of strings in schemas."""

from collections.abc import Mapping
from typing import Any

from caravan_dialects.chat.pattern_problem import pattern_problem
from caravan_dialects.chat.schema_problem import Path, UnsupportedSchemaError

# Those that llguidance knows. JSON Schema has more, which are annotations, as are the inventions of others.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
# Patterns that are found in every text.
_ANY = frozenset({"", ".*", "^", "$", "^.*", ".*$"})


def string_rules(schema: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return ``pattern`` and ``format`` of ``schema``, as far as they constrain."""
    found = {}
    if (pattern := schema.get("pattern")) is not None:
        if not isinstance(pattern, str):
            raise UnsupportedSchemaError("it must be a regular expression", (*path, "pattern"))
        check_pattern(pattern, (*path, "pattern"))
        if pattern not in _ANY:
            found["pattern"] = pattern
    if (name := schema.get("format")) is not None:
        if not isinstance(name, str):
            raise UnsupportedSchemaError("it must be a string", (*path, "format"))
        if name in _FORMATS:
            found["format"] = name
    return found


def check_pattern(pattern: str, path: Path) -> None:
    """Raise UnsupportedSchemaError for an error in ``pattern`` that llguidance does not find."""
    problem = pattern_problem(pattern)
    if problem is not None:
        raise UnsupportedSchemaError(problem, path)
