"""What an output must match. Opaque to the scheduler: shards keep to it."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """How the constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # llguidance's dialect of Lark.
    LARK = "lark"
    # llama.cpp's notation.
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source``: JSON text, a regular expression in Rust's syntax, or a grammar."""

    kind: ConstraintKind
    source: str
