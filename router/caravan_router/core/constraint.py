"""What an output must match. Shards enforce it; the router passes it on unread."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """How a constraint is written."""

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
