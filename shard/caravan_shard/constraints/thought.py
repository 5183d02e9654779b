"""Follows a sequence whose output begins with a thought, which may end by force, before an answer with a grammar."""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from caravan_proto.messages.constraint import Thought
from caravan_shard.constraints.matching import Matching
from caravan_shard.sampling.allowed import Allowed


class _Phase(Enum):
    THINKING = auto()
    # The next tokens are those of the ending.
    ENDING = auto()
    ANSWERING = auto()


class ThoughtMatching:
    """Has the methods of `Matching`, and applies the one of a grammar to the answer.

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
