"""Constraints on outputs. Shards enforce them; the router passes them on unread."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """The language in which a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # llguidance's dialect of Lark.
    LARK = "lark"
    # llama.cpp's notation.
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source`` is JSON text, a regular expression in Rust's syntax, or a grammar, according to ``kind``."""

    kind: ConstraintKind
    source: str
