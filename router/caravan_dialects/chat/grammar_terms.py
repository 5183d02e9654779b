"""Terms of a grammar in llguidance's Lark: texts, control tokens, regular expressions, JSON."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from caravan_dialects.chat.tool_format import HOLE, is_tag, pieces
from caravan_scheduler.core.engine import Engine

# What stands in a hole: the number of a call, or an id.
_HOLE = "/[a-zA-Z0-9]{1,9}/"
_REGEX_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


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
