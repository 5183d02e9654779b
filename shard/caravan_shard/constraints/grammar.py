"""Compiles constraints with llguidance."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from caravan_proto.limits import MAX_CONSTRAINT_BYTES
from caravan_proto.messages.constraint import Constraint
from caravan_shard.constraints.grammar_text import grammar_text
from caravan_shard.constraints.problem import Problem

_MOST_LETTERS = 300

# llguidance's defaults allow 100 ms per mask and 500 MB per sequence.
_LIMITS = LLParserLimits(
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


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
