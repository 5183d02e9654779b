"""A constraint on an output, as the client wrote it."""

from dataclasses import dataclass
from enum import Enum


class ConstraintKind(Enum):
    """The language of the constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    # llguidance's dialect of Lark.
    LARK = "lark"
    # llama.cpp's notation.
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """``source``: JSON text, a regular expression in Rust's syntax, or a grammar. Not checked yet."""

    kind: ConstraintKind
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a constraint cannot be used: a short sentence for the client."""

    sentence: str
