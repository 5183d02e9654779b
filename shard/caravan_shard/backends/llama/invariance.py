"""Finds out whether the logits after a token depend on how many tokens of its sequence are computed with it.

Kernels for one row and for several may add in another order. Where they do, drafts can change texts.
"""

from collections.abc import Callable

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.memory import LlamaMemory

# llama.cpp computes attention over a multiple of 256 cells, and flash attention for one row over 512 or more with
# another kernel.
_CONTEXTS = (300, 100)
_TOKENS = (3, 4, 5, 6)


class BatchInvariance:
    """Compares the bits of logits. The memory must be empty, and is empty afterwards."""

    def __init__(
        self,
        decode: Callable[[TokenBatch], DecodeOutcome],
        logits: Callable[[int], Floats],
        memory: LlamaMemory,
    ) -> None:
        self._decode = decode
        self._logits = logits
        self._memory = memory

    def measure(self, longest: int) -> dict[int, bool]:
        """Return for some numbers of cells whether four tokens behind them have the same logits together and alone.

        The first difference is the last entry. ``longest``: the most tokens of a sequence. Numbers that cannot be
        measured are left out.
        """
        found: dict[int, bool] = {}
        for cells in _CONTEXTS:
            fits = cells + len(_TOKENS) <= longest
            equal = self._is_equal(cells) if fits and all(found.values()) else None
            if equal is not None:
                found[cells] = equal
        return found

    def _is_equal(self, cells: int) -> bool | None:
        """Compare the logits after the last token, which depend on what was computed for all."""
        try:
            # The cells are mixed of two tokens: sums of equal numbers would not show in which order they are added.
            if self._last_logits(0, 1, 2) is None or not self._memory.fill_cells(0, cells):
                return None
            together = self._last_logits(cells, *_TOKENS)
            self._memory.trim(0, cells)
            alone = [self._last_logits(cells + place, token) for place, token in enumerate(_TOKENS)]
            return None if together is None or None in alone else together == alone[-1]
        finally:
            self._memory.clear()

    def _last_logits(self, start: int, *tokens: int) -> bytes | None:
        """Compute ``tokens`` from position ``start`` on; return the logits after the last one, None if that failed."""
        count = len(tokens)
        batch = TokenBatch(
            tokens=np.array(tokens, np.int32),
            positions=np.arange(start, start + count, dtype=np.int32),
            sequence_ids=np.zeros(count, np.int32),
            outputs=np.ones(count, np.int8),
        )
        return self._logits(count)[-1].tobytes() if self._decode(batch) is DecodeOutcome.OK else None
