"""Writes each kind of constraint in llguidance's own notation, and compiles it."""

import json
import re
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from caravan_proto.limits import MAX_CONSTRAINT_BYTES
from caravan_proto.messages.constraint import Constraint, ConstraintKind

# Strings, character classes, comments, and the dot that stands for any character.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ASCII = 0x80

# Where only one text is allowed, the model still chooses the tokens for it. Forcing them would tokenize that text again
# at each step, which is slow for a long one.
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
# White space between the parts of a JSON text: none, a space, or a line break with some indentation. Without a limit,
# small models write line breaks for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"\x20|\n\x20{0,32}"}
_JSON_OPTIONS_KEY = "x-guidance"

_MOST_LETTERS = 300

# llguidance's defaults allow 100 ms per mask and 500 MB per sequence.
_LIMITS = LLParserLimits(
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a constraint cannot be used: a short sentence for the client."""

    sentence: str


def lark_from_gbnf(source: str) -> str:
    """Translate GBNF, llama.cpp's grammar notation, by llguidance's converter, whose faults are worked around.

    Raises ValueError.
    """
    try:
        return str(gbnf_to_lark(_PARTS.sub(_normalize, source)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the converter raises plain Exception for syntax it does not understand
        raise ValueError(str(error)) from error


def _normalize(match: re.Match[str]) -> str:
    part = match[0]
    if part == ".":
        # Lark's dot does not match a line break.
        return '(. | "\\n")'
    return part if part.startswith("#") else _ESCAPES.sub(_plain, part)


def _plain(match: re.Match[str]) -> str:
    """Rewrite an escape: the converter strips leading zeros off long escapes, and does not know ``\\-``."""
    digits = match[1] or match[2]
    if digits is None:
        return "\\x2d" if match[3] == "-" else match[0]
    code = int(digits, 16)
    if code < _ASCII:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{match[0]} is no character")
    return chr(code)


def grammar_text(constraint: Constraint) -> str:
    """Return the text for LLMatcher; raises ValueError with a sentence for the client.

    LLMatcher finds the errors that are not found here.
    """
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return _json_schema(source)
        case ConstraintKind.REGEX:
            return _join(_lark(f"start: /{regex_to_lark(source)}/"))
        case ConstraintKind.LARK:
            return _join(_lark(source))
        case ConstraintKind.GBNF:
            return _join(_lark(lark_from_gbnf(source)))


def _json_schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("it must be a JSON object")
    if _JSON_OPTIONS_KEY in schema:
        raise ValueError(f"{_JSON_OPTIONS_KEY} is not supported")
    return _join(_lark("start: @body"), {"name": "body", "json_schema": schema | {_JSON_OPTIONS_KEY: _JSON_OPTIONS}})


def _lark(source: str) -> dict[str, Any]:
    # The options come last, so that the line numbers in llguidance's errors are those of the source.
    return {"lark_grammar": source + _OPTIONS}


def _join(*grammars: dict[str, Any]) -> str:
    return json.dumps({"grammars": grammars})


class Grammar:
    """A compiled constraint, shared by any number of sequences. Any thread may call `start`."""

    __slots__ = ("_matcher", "_tokenizer", "eog_ids", "vocabulary_size")

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, eog_ids: tuple[int, ...]) -> None:
        """``matcher``: at the start of an output, where it must stay."""
        self._matcher = matcher
        self._tokenizer = tokenizer
        self.vocabulary_size = tokenizer.vocab_size
        self.eog_ids = eog_ids

    def start(self) -> LLMatcher:
        """Return a new matcher at the start of an output."""
        return self._matcher.deep_copy()

    def longest_tokens(self, text: str) -> list[int]:
        """Return the tokens of ``text``, each as long as possible. A model often has the same, but not always."""
        return self._tokenizer.greedy_tokenize(text)


def check_size(constraint: Constraint) -> Problem | None:
    """Return the problem of a source that is too large. Call it before anything else reads the source."""
    # Every character takes at least a byte, so a source with too many characters needs no encoding.
    source = constraint.source
    size = len(source) if len(source) > MAX_CONSTRAINT_BYTES else len(source.encode())
    if size > MAX_CONSTRAINT_BYTES:
        return Problem(f"{constraint.kind.value} must have <= {MAX_CONSTRAINT_BYTES} bytes. Given: {size}")
    return None


def make_matcher(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher | Problem:
    """Compile a constraint. A hostile source may take any time and memory or end the process: see `check_process`."""
    name = constraint.kind.value
    try:
        text = grammar_text(constraint)
    except ValueError as error:
        return Problem(f"{name} cannot be used: {_brief(str(error))}")
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    return find_problem(name, matcher) or matcher


def find_problem(name: str, matcher: LLMatcher) -> Problem | None:
    """Return the error of a matcher that has given up; None if it has not."""
    if not matcher.is_error():
        return None
    return Problem(f"{name} cannot be used: {_brief(matcher.get_error())}")


def _brief(text: str) -> str:
    """Shorten llguidance's error to one line, without its indented quotes of the source and without backtraces."""
    if text.startswith("panic"):
        return "it is not understood"
    if text.startswith("NoExtension"):
        return "nothing matches it"
    line = " ".join(line for line in text.partition("<backtrace>")[0].splitlines() if line.strip() == line != "")
    if len(line) <= _MOST_LETTERS:
        return line
    # The beginning may quote a long regular expression; the reason follows it.
    half = _MOST_LETTERS // 2
    return f"{line[:half]} ... {line[-half:]}"
