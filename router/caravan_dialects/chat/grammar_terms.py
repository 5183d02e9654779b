"""Terms of a grammar in llguidance's Lark: texts, control tokens, regular expressions, JSON.

A text without quotes gets a term that no value of another type matches, for which a reader could take it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.chat.argument_types import Schema
from caravan_dialects.chat.tool_format import HOLE, is_tag, pieces
from caravan_scheduler.core.engine import Engine

# What stands in a hole: the number of a call, or an id.
_HOLE = "/[a-zA-Z0-9]{1,9}/"
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")
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


@dataclass(frozen=True, slots=True)
class Terms:
    """Makes terms. ``controls``: ids of the tags that are control tokens, which match by their id only."""

    controls: Mapping[str, int]

    def text(self, text: str) -> str:
        """Return a term for ``text``, in which HOLE stands for an id; "" for no text."""
        terms: list[str] = []
        plain = ""
        for piece in [*pieces(text), ""]:
            term = f"<[{self.controls[piece]}]>" if piece in self.controls else _HOLE if piece == HOLE else ""
            if (term or not piece) and plain:
                terms.append(quoted(plain))
                plain = ""
            if term:
                terms.append(term)
            else:
                plain += piece
        return " ".join(terms)

    def is_control(self, text: str) -> bool:
        """Whether ``text`` begins with a control token, which no other text contains."""
        return bool(text) and pieces(text)[0] in self.controls


async def terms_for(engine: Engine, texts: Iterable[str]) -> Terms:
    """Return the terms of a vocabulary for ``texts``. Raises NoShardError."""
    controls = {}
    for tag in sorted({piece for text in texts for piece in pieces(text) if piece and is_tag(piece)}):
        tokens = await engine.queries.tokenize(tag, add_special=False)
        if len(tokens.token_ids) == 1 and tokens.specials[0]:
            controls[tag] = tokens.token_ids[0]
    return Terms(controls)


def quoted(text: str) -> str:
    """Return a term for exactly ``text``."""
    # Strings have the same syntax in Lark and in JSON.
    return msgspec.json.encode(text).decode()


def times(term: str, least: int, most: int | None) -> str:
    """Return a term for ``term``, between ``least`` and ``most`` times; None for no limit."""
    return "" if most == 0 else f"({term}){{{least},{'' if most is None else most}}}"


def literal_regex(text: str) -> str:
    """Return a regular expression, as it stands between slashes, for exactly ``text``."""
    return _REGEX_META.sub(r"\\\g<0>", text).replace("\n", "\\n").replace("\r", "\\r")


def json_term(schema: Mapping[str, Any]) -> str:
    """Return a term for JSON that matches ``schema``."""
    return f"%json {msgspec.json.encode(schema).decode()}"


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
