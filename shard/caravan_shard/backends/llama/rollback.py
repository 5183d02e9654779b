"""Memory with recurrent layers whose last tokens llama.cpp can take back.

llama.cpp keeps the states after each of the last tokens of a step, and `llama_memory_seq_rm` makes an earlier one the
state of the sequence. What it does not check, it computes wrong without a word, so it is checked here: that the step
has computed so many tokens of the sequence that the earlier state is one of its states, and that none was taken back
before. The states stay where they are until the next step over the sequence, and `llama_memory_seq_cp` copies the last
one all the same, so a sequence that was cut back gets its state anew before it is copied.
"""

from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.backends.base import CellSlice, TokenBatch
from caravan_shard.backends.llama.places import Places
from caravan_shard.backends.llama.recurrent_memory import RecurrentMemory
from caravan_shard.media.spans import CellSpan

_STATE_ONLY = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class RollbackMemory(RecurrentMemory):
    """Whole sequences are copied and saved; the last few tokens of a step can be taken back, right after it."""

    def __init__(
        self, context: Any, *, sequences: int, shares_cells: bool, transposes: bool, places: Places | None = None
    ) -> None:
        """``context``: one that keeps earlier states. ``shares_cells``: the layout is unified."""
        super().__init__(context, sequences=sequences, shares_cells=shares_cells, transposes=transposes, places=places)
        self._most = int(llama_cpp.llama_n_rs_seq(context))
        # How many tokens of each sequence the last step has computed, as far as nothing has changed since.
        self._computed: dict[int, int] = {}
        # Those whose state is an earlier one.
        self._cut: set[int] = set()

    def after_decode(self, batch: TokenBatch) -> None:
        """Note what can be taken back."""
        ids, counts = np.unique(batch.sequence_ids, return_counts=True)
        self._computed = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        self._cut.difference_update(self._computed)

    def after_failure(self, batch: TokenBatch) -> None:
        """Forget the sequences of ``batch``: llama.cpp may have taken states for theirs that it did not compute."""
        for sequence_id in np.unique(batch.sequence_ids).tolist():
            self.trim(sequence_id, 0)

    def clear(self) -> None:
        """Forget every sequence."""
        super().clear()
        self._computed.clear()
        self._cut.clear()

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens; False if llama.cpp has no state of that length."""
        back = self.length(sequence_id) - length
        if length == 0:
            self._forget(sequence_id)
        elif back > 0:
            if back > self._most or back >= self._computed.pop(sequence_id, 0):
                return False
            self._cut.add(sequence_id)
        return super().trim(sequence_id, length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Start a sequence with all tokens of another."""
        if source_id in self._cut:
            state = self._whole_state(source_id, _STATE_ONLY)
            if not self._set_state(source_id, state, _STATE_ONLY):
                raise RuntimeError(f"llama.cpp does not take back the state of sequence {source_id}")
            self._cut.discard(source_id)
        self._computed.pop(source_id, None)
        super().copy(source_id, destination_id, length)

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put a saved sequence into memory; False, and nothing is held, if there is no room or a state is damaged."""
        self._forget(sequence_id)
        return super().restore(sequence_id, slices, shared, spans)

    def _forget(self, sequence_id: int) -> None:
        self._computed.pop(sequence_id, None)
        self._cut.discard(sequence_id)
