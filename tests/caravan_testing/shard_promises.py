"""Sequences and saved runs as a shard must hold them, for the state machine that sends it random commands."""

from dataclasses import dataclass
from typing import TypedDict

from hypothesis import strategies as st

from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.constraints.grammar import Grammar
from caravan_testing.shard_builders import run_key, toy_grammar
from caravan_testing.toy_oracle import expected_output

_DRAWN = SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.3, seed=9)
# Every sampler that looks at the history.
_HISTORICAL = SamplingParams(
    temperature=1.0,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
    repeat_last_n=8,
    dry_multiplier=0.9,
    dry_allowed_length=1,
    dry_penalty_last_n=12,
    xtc_probability=0.5,
    xtc_threshold=0.05,
    seed=3,
)


class Choosing(TypedDict):
    """How a sequence's tokens are chosen."""

    sampling: SamplingParams
    grammar: Grammar | None
    thought: Thought | None


GREEDY = Choosing(sampling=SamplingParams(temperature=0.0), grammar=None, thought=None)
# One ends with one of some letters, or after two tokens; the other after three tokens at most.
_THOUGHTS = (
    Thought(closings=tuple(bytes([letter]) for letter in b"aeiorst "), ending=tuple(b"]]"), max_tokens=2),
    Thought(closings=(b"\xff\xfe",), ending=tuple(b"</>"), max_tokens=3),
)
CHOOSING = st.sampled_from(
    [
        Choosing(sampling=sampling, grammar=grammar, thought=thought)
        for sampling in (SamplingParams(temperature=0.0), _DRAWN, _HISTORICAL)
        for grammar in (None, toy_grammar("([a-m]{2}-)+|[n-z]{1,3}[.]"))
        for thought in (None, None, *_THOUGHTS)
    ]
)


ADAPTERS = st.sampled_from(["", "", "", "one"])


class Promise:
    """What a sequence was sent, and the output it must have."""

    def __init__(self, prompt: list[int], total: int, choosing: Choosing, max_new: int, adapter: str) -> None:
        self.adapter = adapter
        # The prompt logprobs so far; None if they are not requested.
        self.prompt_logprobs: list[float] | None = None
        self.copied = 0
        self.held = prompt
        self.total = total
        self.choosing = choosing
        self.max_new = max_new
        self.output: list[int] = []
        self.is_parked = False

    @property
    def is_complete(self) -> bool:
        return self.is_parked or len(self.held) == self.total

    @property
    def is_unfinished(self) -> bool:
        return not self.is_parked and (not self.is_complete or self.output != self.expected)

    @property
    def computed(self) -> list[int]:
        """The tokens in the cache: the last output token is not computed yet."""
        return self.held + self.output[:-1]

    def park(self, length: int) -> None:
        self.held, self.output, self.is_parked = self.computed[:length], [], True
        self.prompt_logprobs = None

    @property
    def expected(self) -> list[int]:
        return expected_output(self.held, self.max_new, **self.choosing, adapter=self.adapter)

    def predicted(self, held_back: int, corrupted: int) -> tuple[int, ...]:
        """Return the output of the whole prompt, of which every token with this number, if any, is another."""
        prompt = [*self.held, *[65] * held_back]
        output = expected_output(prompt, self.max_new, **self.choosing, adapter=self.adapter)
        return tuple(66 if corrupted and place % corrupted == 1 else token for place, token in enumerate(output))


@dataclass
class SavedRun:
    """The cells of ``tokens`` from ``start`` on."""

    start: int
    tokens: list[int]
    adapter: str
    on_disk: bool = False

    @property
    def key(self) -> bytes:
        return run_key(self.tokens, self.adapter)

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def cells(self) -> int:
        return self.end - self.start

    def has(self, tokens: list[int], at: int) -> bool:
        """Whether the run has the cell at this position of ``tokens``."""
        return self.start <= at < min(self.end, len(tokens)) and self.tokens[: at + 1] == tokens[: at + 1]


def common_length(tokens: list[int], others: list[int]) -> int:
    both = zip(tokens, others, strict=False)
    return next((at for at, (mine, theirs) in enumerate(both) if mine != theirs), min(len(tokens), len(others)))
