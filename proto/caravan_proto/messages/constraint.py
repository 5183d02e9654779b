"""What an output must match. Shards enforce it; the router passes it on unread."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """The prompt has opened a thought, which ends where the bytes of the output have one of ``closings``.

    After ``max_tokens`` tokens, if that is not None, it ends with the tokens of ``ending`` whatever the model would
    choose. The answer follows it, to which alone a constraint applies. If the model then opens another thought with
    ``opening``, and there is no constraint, that ends at once; an empty one opens none.
    """

    closings: tuple[bytes, ...]
    ending: tuple[int, ...] = ()
    max_tokens: int | None = None
    opening: bytes = b""
