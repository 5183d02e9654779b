"""Where one sequence is in its grammar, and which tokens may follow."""

import logging
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caravan_shard.constraints.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)


class Matching:
    """Advances with tokens that were chosen, never with a pass that failed.

    What may follow does not depend on the pass that is to say which it is: it is found while that one runs.
    """

    __slots__ = ("_allowed", "_grammar", "_ignore_eos", "_matcher")

    def __init__(self, grammar: Grammar, *, ignore_eos: bool) -> None:
        """``ignore_eos``: an end token is allowed only where nothing else is."""
        self._grammar = grammar
        self._ignore_eos = ignore_eos
        self._matcher: LLMatcher | None = None
        self._allowed: Future[NDArray[np.intp]] | None = None

    def begin(self, executor: Executor, output: Sequence[int]) -> None:
        """Start to find what may follow. The first time it takes in ``output``: what the sequence said so far."""
        if self._allowed is None:
            self._allowed = executor.submit(self.find, output)

    def allowed(self) -> NDArray[np.intp]:
        """Ascending ids of what may follow, at least one; waits for it. See `failed`."""
        assert self._allowed is not None, "not begun"
        return self._allowed.result()

    def advance(self, token: int) -> None:
        """A token of `allowed` was chosen."""
        assert self._matcher is not None, "not begun"
        self._allowed = None
        self._matcher.consume_token(token)

    def reset(self) -> None:
        """Back to before the first `begin`."""
        if self._allowed is not None:
            self._allowed.result()
        self._allowed = self._matcher = None

    @property
    def ended(self) -> bool:
        """Nothing may follow what was chosen."""
        assert self._matcher is not None, "not begun"
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """What could follow is not known, and an end token is all that is allowed.

        Earlier output does not match, or to find it would take more than the limits.
        """
        assert self._matcher is not None, "not begun"
        return self._matcher.is_error()

    def find(self, output: Sequence[int]) -> NDArray[np.intp]:
        """`begin` and `allowed` in one, on the caller's thread."""
        if self._matcher is None:
            self._matcher = self._grammar.start()
            self._matcher.consume_tokens(list(output))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            _log.warning("a grammar is at a loss", extra={"error": self._matcher.get_error()[:200]})
            return np.array(self._grammar.eog_ids[:1], np.intp)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=self._grammar.vocabulary_size)
        if self._ignore_eos:
            ends = list(self._grammar.eog_ids)
            kept = bits.copy()
            kept[ends] = 0
            bits = kept if kept.any() else bits
        return np.flatnonzero(bits)
