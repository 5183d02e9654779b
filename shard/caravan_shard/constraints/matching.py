"""Follows one sequence through its grammar and knows which tokens may come next."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from caravan_shard.constraints.grammar import Grammar
from caravan_shard.sampling.allowed import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)


# No more of a text that must come next is made into tokens, for each of them.
_MOST_TOKEN_BYTES = 16


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
