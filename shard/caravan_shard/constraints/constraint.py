"""What an output must match, as the client wrote it."""

from dataclasses import dataclass
from enum import Enum

# A schema or grammar of this size is no prompt's companion any more but a program.
MAX_SOURCE_BYTES = 64 << 10


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
    """``source``: JSON text, a regular expression in Rust's syntax, or a grammar. Nothing is checked yet."""

    kind: ConstraintKind
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a constraint cannot be kept to: a short sentence for the client."""

    sentence: str
