"""A compiled constraint."""

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from caravan_shard.constraints.constraint import MAX_SOURCE_BYTES, Constraint, Problem
from caravan_shard.constraints.grammar_text import grammar_text

_MOST_LETTERS = 300

# llguidance's defaults are for 100 ms a mask and 500 MB a sequence.
_LIMITS = LLParserLimits(
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Grammar:
    """Any number of sequences may start from it; any thread may ask for that."""

    __slots__ = ("_matcher", "eog_ids", "vocabulary_size")

    def __init__(self, matcher: LLMatcher, vocabulary_size: int, eog_ids: tuple[int, ...]) -> None:
        """``matcher`` is at the start of an output and stays there."""
        self._matcher = matcher
        self.vocabulary_size = vocabulary_size
        self.eog_ids = eog_ids

    def start(self) -> LLMatcher:
        """A matcher of one's own."""
        return self._matcher.deep_copy()


def check_size(constraint: Constraint) -> Problem | None:
    """Looked at before anything else is done with it."""
    # No character takes less than a byte: a source far too long is refused without encoding it.
    source = constraint.source
    size = len(source) if len(source) > MAX_SOURCE_BYTES else len(source.encode())
    if size > MAX_SOURCE_BYTES:
        return Problem(f"{constraint.kind.value} must have <= {MAX_SOURCE_BYTES} bytes. Given: {size}")
    return None


def make_matcher(constraint: Constraint, tokenizer: LLTokenizer) -> LLMatcher | Problem:
    """Compile. A hostile source may take any time and memory, or end the process: see `CheckProcess`."""
    name = constraint.kind.value
    try:
        text = grammar_text(constraint)
    except ValueError as error:
        return Problem(f"{name} cannot be used: {_brief(str(error))}")
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    return find_problem(name, matcher) or matcher


def find_problem(name: str, matcher: LLMatcher) -> Problem | None:
    """What the matcher gave up for, if it did."""
    if not matcher.is_error():
        return None
    return Problem(f"{name} cannot be used: {_brief(matcher.get_error())}")


def _brief(text: str) -> str:
    """One line: no quotes of the source, which are indented, and nothing that is for llguidance's makers."""
    if text.startswith("panic"):
        return "it is not understood"
    if text.startswith("NoExtension"):
        return "nothing matches it"
    line = " ".join(line for line in text.partition("<backtrace>")[0].splitlines() if line.strip() == line != "")
    if len(line) <= _MOST_LETTERS:
        return line
    # The beginning may quote a long regular expression, and the reason comes after that.
    half = _MOST_LETTERS // 2
    return f"{line[:half]} ... {line[-half:]}"
