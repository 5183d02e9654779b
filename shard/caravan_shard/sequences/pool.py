"""Keeps the shard's sequences and the backend's cache in step with each other."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

from caravan_shard.backends.base import Backend, Prefix, Saving
from caravan_shard.constraints.matching import Matching
from caravan_shard.kv_layout import KvLayout
from caravan_shard.protocol.commands import Chunk, Header, SwapInEntry, SwapOutEntry
from caravan_shard.sampling.penalties import make_penalties
from caravan_shard.sequences.sequence import Phase, Sequence, used_cells
from caravan_shard.sequences.swap import Swapped, SwapSpace

_log = logging.getLogger(__name__)


class SequencePool:
    """The held sequences by id. Callers have checked every argument."""

    def __init__(self, backend: Backend, swap: SwapSpace) -> None:
        self.held: dict[int, Sequence] = {}
        self.swap = swap
        self._backend = backend
        self._capacity = backend.capacity
        self._births = count()

    @property
    def free_cells(self) -> int:
        """Cells no sequence holds."""
        return self._capacity.cells - used_cells(self.held.values(), self._capacity.layout)

    def apply(self, header: Header) -> None:
        """Carry out a command's header."""
        self.release(header.release_ids)
        for park in header.parks:
            self._park(park.sequence_id, park.length)
        self.swap.drop(header.dropped_handles)

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences and free their cells."""
        for sequence_id in sequence_ids:
            del self.held[sequence_id]
            self._backend.trim(sequence_id, 0)

    def clear(self) -> None:
        """Forget every sequence, the swapped ones too."""
        self.release(list(self.held))
        self.swap.clear()

    def make(self, chunk: Chunk) -> Sequence:
        """Make the new sequence of a first chunk. The pool changes only with `share` and after the step."""
        assert chunk.parameters is not None
        vocabulary, grammar = self._backend.vocabulary, chunk.parameters.grammar
        sequence = Sequence(
            sequence_id=chunk.sequence_id,
            parameters=chunk.parameters,
            birth=next(self._births),
            own_start=chunk.start,
            computed=chunk.start,
            penalties=make_penalties(chunk.parameters.sampling, lambda token: vocabulary.piece(token).data),
            matching=Matching(grammar) if grammar is not None else None,
        )
        if chunk.copy is not None:
            sequence.extend(self.held[chunk.copy.source_id].tokens[: chunk.copy.length])
            self._inherit(sequence, chunk.copy)
        return sequence

    def has_room(self, sequences: Iterable[Sequence], tokens: int) -> bool:
        """Whether ``tokens`` more fit beside the held sequences. ``sequences`` replace held ones with their ids."""
        after = self.held | {sequence.sequence_id: sequence for sequence in sequences}
        return used_cells(after.values(), self._capacity.layout) + tokens <= self._capacity.cells

    def share(self, chunks: Iterable[Chunk]) -> None:
        """Make the copies of first chunks, then cut back the sequences that are taken over.

        In this order, every copy sees its source as it was before.
        """
        copies = [(chunk.sequence_id, chunk.copy) for chunk in chunks if chunk.copy is not None]
        for sequence_id, copy in copies:
            if copy.source_id != sequence_id:
                self._backend.copy(copy.source_id, sequence_id, copy.length)
                self._expect(sequence_id, copy.length)
        for sequence_id, copy in copies:
            if copy.source_id == sequence_id and copy.length < self.held[sequence_id].computed:
                self._park(sequence_id, copy.length)

    def cut_back(self, sequence_id: int, length: int) -> None:
        """Undo a failed step: cut the cache back to ``length`` tokens of this id."""
        if sequence_id not in self.held:
            self._backend.trim(sequence_id, 0)
        elif self._backend.length(sequence_id) != length and not (
            self._backend.trim(sequence_id, length) and self._backend.length(sequence_id) == length
        ):
            _log.error("a sequence could not be cut back and is lost", extra={"sequence": sequence_id})
            self.release([sequence_id])

    def swap_out(self, entry: SwapOutEntry) -> bool:
        """Save a sequence if possible, and release it; True if it was saved."""
        sequence = self.held[entry.sequence_id]
        saved = False
        can_be = self._capacity.saving is not Saving.NOTHING and self.swap.most_bytes >= 0
        if can_be and sequence.phase is not Phase.ENDED:
            state = self._backend.save(entry.sequence_id, entry.start, self.swap.most_bytes)
            saved = state is not None and self.swap.put(entry.handle, Swapped(sequence, entry.start), state)
        self.release([entry.sequence_id])
        return saved

    def swap_in(self, entry: SwapInEntry) -> bool:
        """Restore a sequence and forget its handle; True if it was restored."""
        taken = self.swap.take(entry.handle)
        if taken is None:
            return False
        swapped, state = taken
        sequence = replace(
            swapped.sequence,
            sequence_id=entry.sequence_id,
            birth=next(self._births),
            inherited=(),
            own_start=swapped.start,
        )
        if entry.copy is not None:
            self._inherit(sequence, entry.copy)
        if not self.has_room([sequence], 0) or not self._backend.restore(entry.sequence_id, state, entry.copy):
            return False
        self._expect(entry.sequence_id, sequence.computed)
        self.held[entry.sequence_id] = sequence
        return True

    def _inherit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Record the cells of a copied prefix: those of the source if unified, new ones if split."""
        if self._capacity.layout is KvLayout.UNIFIED:
            sequence.inherited = self.held[prefix.source_id].runs_up_to(prefix.length)
        else:
            sequence.own_start = 0

    def _park(self, sequence_id: int, length: int) -> None:
        self.held[sequence_id].park(length)
        self.cut_back(sequence_id, length)

    def _expect(self, sequence_id: int, length: int) -> None:
        held = self._backend.length(sequence_id)
        assert held == length, f"sequence {sequence_id} holds {held} tokens, not {length}"
