"""Cuts, copies, saves and restores sequences in llama.cpp's memory, which is its KV cache."""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np

from caravan_proto.messages.commands import PrefixCopy
from caravan_shard.arrays import State
from caravan_shard.backends.base import CellSlice, TokenBatch
from caravan_shard.backends.llama.memory.cell_state import CacheCells, StateError, StateFormat, find_format
from caravan_shard.backends.llama.memory.places import Places
from caravan_shard.backends.llama.memory.recurrent_state import RecurrentFormat
from caravan_shard.media import CellSpan

TO_THE_END = -1


class LlamaMemory:
    """The memory of one context. Callers have checked ids and lengths: llama.cpp ends the process on some misuses."""

    def __init__(
        self, context: Any, *, copies_whole: bool, streams: int, transposes: bool, places: Places | None = None
    ) -> None:
        """``copies_whole``: llama.cpp can only copy all that the source holds; the copy is then cut.

        ``transposes``: the context keeps values transposed. Saved states never have them so: any context can use them.
        """
        self.places = places or Places()
        self._context = context
        self._transposes = transposes
        self._memory = llama_cpp.llama_get_memory(context)
        self._copies_whole = copies_whole
        self._streams = streams
        # States that are needed for a moment; kept, because new memory is slower to write than to read.
        self._scratch: State = np.empty(0, np.uint8)
        # None if states cannot be taken apart.
        self._format: StateFormat | None = None

    def find_format(self, sequence_id: int) -> StateFormat | RecurrentFormat | None:
        """Find how states are made, from a sequence of a few tokens; None if states cannot be taken apart."""
        try:
            self._format = find_format(self._whole_state(sequence_id))
        except StateError:
            self._format = None
        return self._format

    @property
    def form(self) -> StateFormat | RecurrentFormat | None:
        """The format that was found; None if states cannot be taken apart."""
        return self._format

    def set_format(self, form: StateFormat | None) -> None:
        """Use a format that was found in another context of the model."""
        self._format = form

    def after_decode(self, batch: TokenBatch) -> None:
        """Note that the rows of ``batch`` are in memory now."""
        self.places.note(batch)

    def clear(self) -> None:
        """Forget every sequence."""
        # The cells' contents stay, as those of ended sequences do. llama.cpp has filled all cells with zeros once, so
        # that none has what is not a number; to do it again takes half a second for each 3 GiB.
        llama_cpp.llama_memory_clear(self._memory, False)
        self.places.clear()

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are in memory."""
        return self.places.length(sequence_id, int(llama_cpp.llama_memory_seq_pos_max(self._memory, sequence_id)))

    def trim(self, sequence_id: int, length: int) -> bool:
        """Keep the first ``length`` tokens; False if llama.cpp cannot."""
        first = self.places.position(sequence_id, length) or TO_THE_END
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, first, TO_THE_END):
            return False
        self.places.trim(sequence_id, length)
        return True

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Start a sequence with the first tokens of another: by reference, or by copy in the split layout."""
        assert self.length(destination_id) == 0, f"sequence {destination_id} holds tokens"
        end = TO_THE_END if self._copies_whole else self.places.position(source_id, length)
        llama_cpp.llama_memory_seq_cp(self._memory, source_id, destination_id, TO_THE_END, end)
        self.places.copy(source_id, destination_id, length)
        if self._copies_whole and length < self.length(source_id):
            self.trim(destination_id, length)

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Return the state of the cells [start, end); None if it exceeds ``most_bytes`` or cannot be had."""
        form = self._format
        if form is None or form.state_bytes(self._streams, end - start) > most_bytes:
            return None
        try:
            return self._saved(form, sequence_id, start, end, releasing=releasing)
        except StateError:
            return None

    def _saved(self, form: StateFormat, sequence_id: int, start: int, end: int, *, releasing: bool) -> State:
        """Return the state of the cells [start, end); raises StateError."""
        if releasing:
            first, last = self.places.position(sequence_id, start), self.places.position(sequence_id, end)
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, last, TO_THE_END)
            llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, 0, first)
            if not self._transposes:
                return self._whole_state(sequence_id)
        state = self._get_state(sequence_id, self._lent(self._state_bytes(sequence_id)))
        return self._built(form, [[self.places.cut(cache, sequence_id, start, end)] for cache in form.parse(state)])

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Put saved cells into memory; False, and nothing is held, if there is no room or a state is damaged."""
        assert self.length(sequence_id) == 0, f"sequence {sequence_id} holds tokens"
        form = self._format
        self.places.set(sequence_id, spans)
        if form is None:
            return False
        first = 0 if shared is None or self._copies_whole else shared.length
        own = [replace(one, start=max(one.start, first)) for one in slices if one.end > first]
        try:
            pieces = [
                [self.places.cut(cache, sequence_id, one.start, one.end) for cache in form.parse(one.state)]
                for one in own
            ]
        except StateError:
            return False
        if pieces and not self.put(form, sequence_id, list(zip(*pieces, strict=True))):
            return False
        if shared is not None and first:
            end = self.places.position(sequence_id, first)
            llama_cpp.llama_memory_seq_cp(self._memory, shared.source_id, sequence_id, TO_THE_END, end)
        return True

    def put(self, form: StateFormat, sequence_id: int, parts: Sequence[Sequence[CacheCells]]) -> bool:
        """Put cells into memory, ``parts`` of each cache; False, and nothing is held, if there is no room."""
        state = self._lent(form.state_bytes(self._streams, sum(len(part.positions) for part in parts[0])))
        form.build(parts, self._streams, state, transposes=self._transposes)
        return self._set_state(sequence_id, state)

    def fill_cells(self, sequence_id: int, length: int) -> bool:
        """Let a sequence hold ``length`` cells, each mixed of those that it holds; False, and nothing is held, if it
        cannot.
        """
        form = self._format
        try:
            held = form.parse(self._whole_state(sequence_id)) if form is not None else []
        except StateError:
            held = []
        self.trim(sequence_id, 0)
        if form is None or not held:
            return False
        positions = np.arange(length, dtype=np.int32)
        rows = [[_mixed(rows, length) for rows in cache.rows] for cache in held]
        extras = [np.resize(cache.extras, (length, cache.extras.shape[1])) for cache in held]
        return self.put(form, sequence_id, [[CacheCells(positions, *each)] for each in zip(rows, extras, strict=True)])

    def _built(self, form: StateFormat, parts: Sequence[Sequence[CacheCells]]) -> State:
        cells = sum(len(part.positions) for part in parts[0])
        state: State = np.empty(form.state_bytes(self._streams, cells), np.uint8)
        form.build(parts, self._streams, state)
        return state

    def _lent(self, size: int) -> State:
        """Return ``size`` bytes that are valid until the next call."""
        if size > self._scratch.nbytes:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch[:size]

    def _whole_state(self, sequence_id: int, flags: int = 0) -> State:
        """Return the state of all cells that the sequence holds; raises StateError."""
        return self._get_state(sequence_id, np.empty(self._state_bytes(sequence_id, flags), np.uint8), flags)

    def _get_state(self, sequence_id: int, state: State, flags: int = 0) -> State:
        size = state.nbytes
        written = llama_cpp.llama_state_seq_get_data_ext(self._context, _bytes_of(state), size, sequence_id, flags)
        if not 0 < size == int(written):
            raise StateError("llama.cpp cannot write the state")
        return state

    def _state_bytes(self, sequence_id: int, flags: int = 0) -> int:
        return int(llama_cpp.llama_state_seq_get_size_ext(self._context, sequence_id, flags))

    def _set_state(self, sequence_id: int, state: State, flags: int = 0) -> bool:
        size = state.nbytes
        if size == llama_cpp.llama_state_seq_set_data_ext(self._context, _bytes_of(state), size, sequence_id, flags):
            return True
        llama_cpp.llama_memory_seq_rm(self._memory, sequence_id, TO_THE_END, TO_THE_END)
        return False


def clear_free_cells(context: Any) -> None:
    """Fill the cells of a context that no sequence holds with zeros.

    Raises RuntimeError if llama.cpp cannot read what it has written.
    """
    size = int(llama_cpp.llama_state_get_size(context))
    state: State = np.empty(size, np.uint8)
    written = llama_cpp.llama_state_get_data(context, _bytes_of(state), size)
    # Before it reads a state of all sequences, it fills all cells with zeros.
    read = llama_cpp.llama_state_set_data(context, _bytes_of(state), size)
    if not size == written == read:
        raise RuntimeError(f"llama.cpp has read {read} bytes of a state of {size} bytes")


def _bytes_of(state: State) -> Any:
    return ctypes.cast(state.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


def _mixed(rows: State, count: int) -> State:
    """Return ``count`` rows. Each two bytes are those that one of ``rows`` has there, so all data types stay valid."""
    pairs = np.ascontiguousarray(rows).view(np.uint16)
    sources = np.random.default_rng(0).integers(len(pairs), size=(count, pairs.shape[1]))
    mixed: State = np.take_along_axis(pairs, sources, axis=0).view(np.uint8)
    return mixed
