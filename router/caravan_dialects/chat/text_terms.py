"""Terms of a grammar for texts without quotes, which a reader must not take for values of other types."""

from collections.abc import Collection

from caravan_dialects.chat.argument_types import Schema
from caravan_dialects.chat.grammar_terms import literal_regex

_ANY = "(?s:.*)"
# What Python's strip removes.
_SPACE = r"[\s\x1c-\x1f]*"
_WORDS = {
    "integer": "-?[0-9]+",
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?",
    "boolean": "(true|false|True|False)",
    "null": "(null|None)",
}
# What values of a type begin with.
_BEGINNINGS = {"integer": "[-0-9]", "number": "[-0-9]", "array": r"\[", "object": r"\{"}
# Values of these types in JSON, where their schema says no more.
_PLAIN = {
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/",
    "boolean": "/true|false/",
    "null": "/null/",
}
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[-+]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
}


def text_term(schema: Schema) -> str:
    """Return a term for the texts that match ``schema``, of type string."""
    terms = []
    if isinstance(pattern := schema.get("pattern"), str):
        terms.append(f"/{_found(pattern)}/")
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least or most is not None:
        terms.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if (known := _FORMATS.get(str(schema.get("format")))) is not None:
        terms.append(f"/{known}/")
    return f"({' & '.join(terms)})" if terms else f"/{_ANY}/"


def _found(pattern: str) -> str:
    """Return a regular expression, as it stands between slashes, for all texts in which ``pattern`` is found."""
    start = "" if pattern.startswith("^") else _ANY
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else _ANY
    inner = pattern.removeprefix("^")
    inner = (inner if end else inner[:-1]).replace("\\/", "/").replace("/", "\\/")
    return f"{start}({inner}){end}"


def key_term(pattern: str, most: int, taken: Collection[str]) -> str:
    """Return a term for a name that any syntax can carry, that has ``pattern``, and that is none of ``taken``."""
    terms = [f"/[A-Za-z_][A-Za-z0-9_]{{0,{most - 1}}}/"]
    terms += [f"/{_found(pattern)}/"] if pattern else []
    terms += [f"~/{literal_regex(name)}/" for name in taken]
    return " & ".join(terms)


def without(text: str) -> str:
    """Return a term for what does not have ``text`` in it."""
    return f"~/{_ANY}{literal_regex(text)}{_ANY}/"


def not_begun(text: str) -> str:
    """Return a term for what does not begin with ``text``."""
    return f"~/{_SPACE}{literal_regex(text)}{_ANY}/"


def unlike(kind: str) -> str:
    """Return a term for texts that are not read as values of the type ``kind``."""
    return f"~/{_SPACE}{_WORDS[kind]}{_SPACE}/" if kind in _WORDS else begun_unlike(kind)


def begun_unlike(kind: str) -> str:
    """Return a term for texts that do not even begin as values of the type ``kind``."""
    return f"~/{_SPACE}{_BEGINNINGS[kind]}{_ANY}/" if kind in _BEGINNINGS else unlike(kind)


def plain_term(kind: str) -> str | None:
    """Return a term for all values of the type ``kind``; None if no regular expression can tell them."""
    return _PLAIN.get(kind)
