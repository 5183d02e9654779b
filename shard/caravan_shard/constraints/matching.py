"""Where one sequence is in its grammar, and which tokens may follow."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caravan_shard.constraints.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)


class Matching:
    """`find`, then `advance` with a token of `allowed`, and so on. A pass that failed changes nothing of it."""

    __slots__ = ("_allowed", "_grammar", "_ignore_eos", "_matcher")

    def __init__(self, grammar: Grammar, *, ignore_eos: bool) -> None:
        """``ignore_eos``: an end token is allowed only where nothing else is."""
        self._grammar = grammar
        self._ignore_eos = ignore_eos
        self._matcher: LLMatcher | None = None
        self._allowed: NDArray[np.intp] | None = None

    def find(self, output: Sequence[int]) -> None:
        """Find what may follow, if it is not known. The first time it takes in ``output``: what was said so far."""
        if self._allowed is not None:
            return
        if self._matcher is None:
            self._matcher = self._grammar.start()
            self._matcher.consume_tokens(list(output))
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            _log.warning("a grammar is at a loss", extra={"error": self._matcher.get_error()[:200]})
            self._allowed = np.array(self._grammar.eog_ids[:1], np.intp)
        else:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=self._grammar.vocabulary_size)
            # As Booleans: numpy finds those ten times as fast.
            self._allowed = self._spare_ends(np.flatnonzero(bits.view(np.bool_)))

    @property
    def allowed(self) -> NDArray[np.intp]:
        """Ascending ids of what may follow, at least one; see `failed`."""
        assert self._allowed is not None, "not found"
        return self._allowed

    def advance(self, token: int) -> None:
        """A token of `allowed` was chosen."""
        assert self._matcher is not None, "not found"
        self._allowed = None
        self._matcher.consume_token(token)

    def reset(self) -> None:
        """Back to before the first `find`."""
        self._allowed = self._matcher = None

    @property
    def ended(self) -> bool:
        """Nothing may follow what was chosen."""
        assert self._matcher is not None, "not found"
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """What could follow is not known, and an end token is all that is allowed.

        Earlier output does not match, or to find it would take more than the limits.
        """
        assert self._matcher is not None, "not found"
        return self._matcher.is_error()

    def _spare_ends(self, ids: NDArray[np.intp]) -> NDArray[np.intp]:
        if not self._ignore_eos:
            return ids
        others = ids[~np.isin(ids, self._grammar.eog_ids)]
        return others if len(others) else ids
