"""Follows one sequence through its grammar and knows which tokens may come next.

An output may begin with a thought, which may end by force, before an answer with a grammar. Masks are computed while
the forward pass runs, so that they cost no time of their own.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from time import thread_time
from typing import TYPE_CHECKING

import numpy as np

from caravan_proto.messages.constraint import Thought
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.sampling.choice import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)

# No more of a text that must come next is made into tokens, for each of them.
_MOST_TOKEN_BYTES = 16
# On two cores, a step took so much longer where a thread found its masks than they took.
_HAND_OVER_S = 100e-6
_FIRST_GUESS_S = 1e-3
# Share of the time of masks that is expected of the next ones, if they do not take longer.
_KEPT = 0.9


class Matching:
    """Call `find`, then `advance` with a token of `allowed`, and so on.

    After a failed forward pass, call `find` again: it keeps what it found.
    """

    __slots__ = ("_allowed", "_grammar", "_matcher")

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._matcher: LLMatcher | None = None
        self._allowed: Allowed | None = None

    def find(self, output: Sequence[int]) -> None:
        """Find which tokens may follow, unless they are known. The first call consumes ``output``: all so far."""
        if self._allowed is not None:
            return
        if self._matcher is None:
            self._matcher = self._grammar.start()
            self._matcher.consume_tokens(list(output))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            _log.warning("a grammar failed", extra={"error": self._matcher.get_error()[:200]})
            self._allowed = Allowed.of(self._grammar.eog_ids[:1])
        else:
            self._allowed = Allowed.from_mask(np.frombuffer(mask, np.uint8), self._grammar.vocabulary_size)

    @property
    def allowed(self) -> Allowed:
        """The tokens that may follow, at least one; see `failed`."""
        assert self._allowed is not None, "not found"
        return self._allowed

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar says where the output may end; see `ThoughtMatching`."""
        return True

    @property
    def needs_more(self) -> bool:
        """Whether the output must not end yet, which `allowed` does not say; see `ThoughtMatching`."""
        return False

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens of the text that must come next; none if there is a choice.

        The model may choose other tokens for the same text. The last token is left out, as it may be a part of a longer
        one.
        """
        if self._matcher is None or self._matcher.is_error() or self._matcher.is_stopped():
            return []
        text = self._matcher.compute_ff_bytes()[: (most + 1) * _MOST_TOKEN_BYTES].decode(errors="ignore")
        return self._grammar.longest_tokens(text)[:-1][:most] if text else []

    def count_matching(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` may follow. The state stays as it is."""
        if self._matcher is None or self._matcher.is_error() or self._matcher.is_stopped():
            return 0
        return self._matcher.validate_tokens(list(tokens))

    def advance(self, token: int) -> None:
        """Consume the chosen token, one of `allowed`."""
        assert self._matcher is not None, "not found"
        self._allowed = None
        self._matcher.consume_token(token)

    def reset(self) -> None:
        """Return to the state before the first `find`."""
        self._allowed = self._matcher = None

    @property
    def ended(self) -> bool:
        """Whether the output is complete: nothing may follow."""
        assert self._matcher is not None, "not found"
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """Whether llguidance has given up; an end token is all that is allowed then.

        The earlier output does not match, or finding the mask would exceed the limits.
        """
        assert self._matcher is not None, "not found"
        return self._matcher.is_error()


class _Phase(Enum):
    THINKING = auto()
    # The next tokens are those of the ending.
    ENDING = auto()
    ANSWERING = auto()


class ThoughtMatching:
    """Follows an output that begins with a thought. Has the methods of `Matching`; the grammar's follows the answer.

    What it knows follows from the output alone, so a sequence that is computed again has the same tokens.
    """

    __slots__ = (
        "_answer",
        "_count",
        "_forced",
        "_inner",
        "_inner_started",
        "_may_reopen",
        "_phase",
        "_piece",
        "_started",
        "_tail",
        "_thought",
    )

    def __init__(self, thought: Thought, inner: Matching | None, piece: Callable[[int], bytes]) -> None:
        """``inner``: the matching of the answer's grammar. ``piece``: returns the bytes of a token."""
        self._thought = thought
        self._inner = inner
        self._piece = piece
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first `find`."""
        self._started = self._inner_started = False
        self._phase = _Phase.ENDING if self._thought.max_tokens == 0 else _Phase.THINKING
        # Tokens of the thought, and of its ending, so far.
        self._count = self._forced = 0
        # Whether the thought ended by force, so that another one ends at once.
        self._may_reopen = False
        # The last bytes of the thought, which may begin a closing, or of the answer, which may open another thought.
        self._tail = b""
        # Tokens of the answer that the grammar's matching has not seen.
        self._answer: list[int] = []
        if self._inner is not None:
            self._inner.reset()

    def find(self, output: Sequence[int]) -> None:
        """Find which tokens may follow. The first call consumes ``output``: all so far."""
        if not self._started:
            self._started = True
            for token in output:
                if self._phase is _Phase.ANSWERING and self._inner is not None:
                    self._answer.append(token)
                else:
                    self._consume(token)
        if self._inner is not None and self._phase is _Phase.ANSWERING:
            self._inner.find(self._answer)
            self._inner_started = True
            self._answer = []

    @property
    def allowed(self) -> Allowed | None:
        """The tokens that may follow; None for any."""
        match self._phase:
            case _Phase.THINKING:
                return None
            case _Phase.ENDING:
                return Allowed.of(self._thought.ending[self._forced : self._forced + 1])
            case _Phase.ANSWERING:
                return None if self._inner is None else self._inner.allowed

    @property
    def has_grammar(self) -> bool:
        """Whether the answer has a grammar."""
        return self._inner is not None

    @property
    def needs_more(self) -> bool:
        """Whether the output must not end yet: its grammar is that of an answer which has not begun."""
        return self._inner is not None and self._phase is not _Phase.ANSWERING

    def forced(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that must come next; none if there is a choice."""
        match self._phase:
            case _Phase.THINKING:
                return []
            case _Phase.ENDING:
                return list(self._thought.ending[self._forced :][:most])
            case _Phase.ANSWERING:
                return [] if self._inner is None else self._inner.forced(most)

    def count_matching(self, tokens: Sequence[int]) -> int:
        """Return how many of the first ``tokens`` may follow; at most those of the thought, while it is not ended."""
        match self._phase:
            case _Phase.THINKING:
                most = self._thought.max_tokens
                return len(tokens) if most is None else min(len(tokens), most - self._count)
            case _Phase.ENDING:
                left = self._thought.ending[self._forced :]
                equal = (token == wanted for token, wanted in zip(tokens, left, strict=False))
                return next((number for number, same in enumerate(equal) if not same), min(len(tokens), len(left)))
            case _Phase.ANSWERING:
                return self._count_answer(tokens) if self._inner is None else self._inner.count_matching(tokens)

    def advance(self, token: int) -> None:
        """Consume the chosen token, one of `allowed`."""
        if self._phase is _Phase.ANSWERING and self._inner is not None:
            self._inner.advance(token)
        else:
            self._consume(token)

    @property
    def ended(self) -> bool:
        """Whether the output is complete: nothing may follow."""
        return self._inner is not None and self._inner_started and self._inner.ended

    @property
    def failed(self) -> bool:
        """Whether the grammar's matching has failed."""
        return self._inner is not None and self._inner_started and self._inner.failed

    def _count_answer(self, tokens: Sequence[int]) -> int:
        """Return how many of ``tokens`` there are up to one that opens another thought."""
        tail: bytes | None = self._tail
        for number, token in enumerate(tokens if self._may_reopen else ()):
            tail = self._answer_tail(tail or b"", token)
            if tail is None:
                return number + 1
        return len(tokens)

    def _answer_tail(self, tail: bytes, token: int) -> bytes | None:
        """Return the last bytes of an answer with ``token``; None if it opens another thought."""
        opening, text = self._thought.opening, tail + self._piece(token)
        return None if opening in text else text[len(text) - len(opening) + 1 :] if len(opening) <= len(text) else text

    def _consume(self, token: int) -> None:
        """Consume a token of the thought, of its ending, or of an answer without a grammar."""
        if self._phase is _Phase.ANSWERING:
            tail = self._answer_tail(self._tail, token) if self._may_reopen else b""
            self._tail = tail or b""
            if tail is None:
                self._forced, self._phase = 0, _Phase.ENDING
            return
        if self._phase is _Phase.ENDING:
            self._forced += 1
            if self._forced == len(self._thought.ending):
                self._phase = _Phase.ANSWERING
                self._may_reopen = self._inner is None and bool(self._thought.opening)
                self._tail = b""
            return
        text = self._tail + self._piece(token)
        if any(closing in text for closing in self._thought.closings):
            self._phase = _Phase.ANSWERING
            return
        self._tail = text[-max(map(len, self._thought.closings)) :]
        self._count += 1
        if self._count == self._thought.max_tokens:
            self._phase = _Phase.ENDING


class Finder:
    """Finds masks: in threads beside the forward pass, or before it where a hand-over would take longer than that.

    llguidance releases the GIL. The worker's thread calls `begin` before a forward pass and `wait` after it.
    """

    def __init__(self, threads: int, clock: Callable[[], float] = thread_time) -> None:
        """``clock`` returns the processor time of the thread that calls it, in seconds."""
        self._threads = threads
        self._clock = clock
        self._pool = ThreadPoolExecutor(threads, "constraints")
        self._running: list[Future[float]] = []
        # Processor time of a mask: the most of the last steps.
        self._mask_s = _FIRST_GUESS_S

    def begin(self, work: Sequence[tuple[Matching | ThoughtMatching, Sequence[int]]]) -> None:
        """Start `Matching.find` for each matching with the output of its sequence so far."""
        if len(work) * self._mask_s < _HAND_OVER_S:
            self._learn(self._find_all(work))
            return
        parts = (work[start :: self._threads] for start in range(self._threads))
        self._running = [self._pool.submit(self._find_all, part) for part in parts if part]

    def wait(self) -> None:
        """Wait until all are done."""
        while self._running:
            self._learn(self._running.pop().result())

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _find_all(self, work: Sequence[tuple[Matching | ThoughtMatching, Sequence[int]]]) -> float:
        """Return the processor time of a mask in seconds."""
        started = self._clock()
        for matching, output in work:
            matching.find(output)
        return (self._clock() - started) / len(work)

    def _learn(self, mask_s: float) -> None:
        self._mask_s = max(mask_s, _KEPT * self._mask_s)
