"""The memory of models with recurrent layers, alone or beside layers that attend (hybrid models).

The cells of layers that attend are saved in runs, which can be cut. The recurrent state cannot be cut. It is saved
apart from them, where a sequence is to be continued.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import CellSlice, DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.memory.cell_state import StateError, state_head
from caravan_shard.backends.llama.memory.memory import TO_THE_END, LlamaMemory
from caravan_shard.backends.llama.memory.places import Places
from caravan_shard.backends.llama.memory.recurrent_state import RecurrentFormat, find_recurrent_format
from caravan_shard.media import CellSpan
from caravan_shard.startup_error import StartupError

_PARTIAL = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

_STATE_ONLY = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY

_ANY_SIZE = 1 << 62
# With other cells, numbers are added in another order. The logits may differ by this part of their range.
_ROUNDING = 0.01
Decode = Callable[[TokenBatch], DecodeOutcome]
Logits = Callable[[int], Floats]


class RecurrentMemory(LlamaMemory):
    """A LlamaMemory whose sequences have recurrent state. An empty range of cells stands for the state at its end."""

    def __init__(
        self, context: Any, *, sequences: int, shares_cells: bool, transposes: bool, places: Places | None = None
    ) -> None:
        """``shares_cells``: the layout is unified."""
        streams = 1 if shares_cells else sequences
        super().__init__(context, copies_whole=True, streams=streams, transposes=transposes, places=places)
        self._ids = range(sequences) if shares_cells else range(0)
        self._recurrent: RecurrentFormat | None = None

    @property
    def form(self) -> RecurrentFormat | None:
        """The format that was found; None if states cannot be taken apart."""
        return self._recurrent

    @property
    def shares_cells(self) -> bool:
        """Whether a restored sequence can have cells in common with another."""
        return len(self._ids) > 1

    def find_format(self, sequence_id: int) -> RecurrentFormat | None:
        """Find how states are made, from a sequence of a few tokens; None if they cannot be taken apart."""
        try:
            block = self._whole_state(sequence_id, _PARTIAL)
            self._recurrent = find_recurrent_format(self._whole_state(sequence_id), block)
        except StateError:
            self._recurrent = None
        return self._recurrent

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the state of the cells [start, end), or the recurrent one; None if it exceeds ``most_bytes``."""
        form = self._recurrent
        if form is None:
            return None
        size = form.block_bytes if start == end else form.cells_bytes(self._streams, end - start)
        if size > most_bytes:
            return None
        try:
            if start == end:
                return self._whole_state(sequence_id, _PARTIAL)[-form.block_bytes :]
            return self._cells(form, sequence_id, start, end)
        except StateError:
            return None

    def _cells(self, form: RecurrentFormat, sequence_id: int, start: int, end: int) -> State:
        """Return the state of the cells [start, end) without the recurrent one; raises StateError."""
        if form.attention is None:
            return np.frombuffer(state_head(), np.uint8)
        # llama.cpp writes all cells of a sequence. So another one, which nothing uses now, gets the ones to be saved.
        unused = next((one for one in self._ids if self.length(one) == 0), None)
        if unused is None:
            state = self._get_state(sequence_id, self._lent(self._state_bytes(sequence_id)))
        else:
            first, last = (self.places.position(sequence_id, border) for border in (start, end))
            llama_cpp.llama_memory_seq_cp(self._memory, sequence_id, unused, first, last)
            try:
                state = self._get_state(unused, self._lent(self._state_bytes(unused)))
            finally:
                self.trim(unused, 0)
        found = form.parse(state[: -form.block_bytes])
        return self._built(form.attention, [[self.places.cut(cache, sequence_id, start, end)] for cache in found])

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put saved cells and the state after them, which is last, into memory; False, and nothing is held, if not."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        form, last = self._recurrent, slices[-1]
        self.places.set(sequence_id, spans)
        # llama.cpp reads at least one cell.
        first = min(shared.length, last.end - 1) if shared is not None and self.shares_cells else 0
        own = [replace(one, start=max(one.start, first)) for one in slices[:-1] if one.end > first]
        try:
            if form is None or last.start != last.end:
                raise StateError("no recurrent state")
            form.check(last.state, int(self.places.all_positions(sequence_id, last.end - 1, last.end)[0]))
            whole = self._whole(form, sequence_id, own, last.state)
        except StateError:
            return False
        if not self._set_state(sequence_id, whole):
            return False
        if shared is None or not first:
            return True
        end = self.places.position(sequence_id, first)
        # The recurrent state of the other sequence comes along, whatever its length, and is replaced.
        llama_cpp.llama_memory_seq_cp(self._memory, shared.source_id, sequence_id, TO_THE_END, end)
        alone = self._lent(len(state_head()) + form.block_bytes)
        alone[: -form.block_bytes] = np.frombuffer(state_head(), np.uint8)
        alone[-form.block_bytes :] = last.state
        return self._set_state(sequence_id, alone, _PARTIAL)

    def _whole(self, form: RecurrentFormat, sequence_id: int, slices: Sequence[CellSlice], block: State) -> State:
        """Return a state of the cells of ``slices`` and of ``block``; raises StateError."""
        pieces = [
            [self.places.cut(cache, sequence_id, one.start, one.end) for cache in form.parse(one.state)]
            for one in slices
        ]
        cells = sum(one.end - one.start for one in slices)
        state = self._lent(form.cells_bytes(self._streams, cells) + form.block_bytes)
        if form.attention is None:
            state[: -form.block_bytes] = np.frombuffer(state_head(), np.uint8)
        else:
            parts = list(zip(*pieces, strict=True))
            form.attention.build(parts, self._streams, state[: -form.block_bytes], transposes=self._transposes)
        state[-form.block_bytes :] = block
        return state


class RollbackMemory(RecurrentMemory):
    """Whole sequences are copied and saved; the last few tokens of a step can be taken back, right after it.

    llama.cpp keeps the states after each of the last tokens of a step, and `llama_memory_seq_rm` makes an earlier one
    the state of the sequence. What it does not check, it computes wrong without a word, so it is checked here: that the
    step has computed so many tokens of the sequence that the earlier state is one of its states, and that none was
    taken back before. The states stay where they are until the next step over the sequence, and `llama_memory_seq_cp`
    copies the last one all the same, so a sequence that was cut back gets its state anew before it is copied.
    """

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


def what_restoring_changes(memory: RecurrentMemory, decode: Decode, logits: Logits) -> str:
    """Save and restore sequence 0, which holds a few tokens. Return what is not as before; empty if all is.

    What the numbers of recurrent state mean cannot be checked by their form, so it is tried at the start.
    """
    length = memory.length(0)
    slices = _saved(memory, length)
    if slices is None:
        return "llama.cpp cannot write the state of this model"
    before = _logits_after(0, length, decode, logits)
    memory.trim(0, 0)
    if not memory.restore(0, slices):
        return "llama.cpp cannot read the state of this model that it has written"
    if memory.length(0) != length:
        return "a restored state of this model has another length"
    if not np.array_equal(before, _logits_after(0, length, decode, logits)):
        return "the logits after a restored state of this model are others than before"
    if not memory.shares_cells:
        return ""
    # Sequence 0 is longer now, so its own state would be another.
    if not memory.restore(1, slices, PrefixCopy(source_id=0, length=1)) or memory.length(1) != length:
        return "a restored sequence of this model cannot have cells of another"
    shared = _logits_after(1, length, decode, logits)
    if np.abs(shared - before).max() > _ROUNDING * np.ptp(before):
        return "the logits of a restored sequence of this model that has cells of another are others than before"
    return ""


def _saved(memory: RecurrentMemory, length: int) -> list[CellSlice] | None:
    """Save sequence 0, its tokens one by one, as the runs of a prefix are; None if that cannot be done."""
    slices: list[CellSlice] = []
    for start, end in (*((at, at + 1) for at in range(length)), (length, length)):
        state = memory.save(0, start, end, _ANY_SIZE, releasing=False)
        if state is None:
            return None
        slices.append(CellSlice(state=state, first=start, start=start, end=end))
    return slices


def _logits_after(sequence_id: int, position: int, decode: Decode, logits: Logits) -> Floats:
    """Return the logits after one more token of a sequence."""
    one = np.ones(1, np.int32)
    outcome = decode(TokenBatch(one, one * position, one * sequence_id, np.ones(1, np.int8)))
    if outcome is not DecodeOutcome.OK:
        raise StartupError(f"a forward pass failed ({outcome.value}); see --log-level debug")
    return logits(1).copy()
