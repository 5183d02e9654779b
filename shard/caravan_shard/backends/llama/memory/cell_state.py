"""Takes llama.cpp's state of a sequence apart into cells, and puts such states together.

A state (`llama_state_seq_get_data_ext`) has these parts, little-endian:

    u32 magic, i32 sequence id
    for each cache (one; two where some layers have a sliding window):
        u32 streams (1 in the unified layout, else the number of sequences)
        for each stream:
            u32 cells (0 for streams of other sequences, which have no further part)
            for each cell: i32 position, u32 number of sequence ids (1), 12 more bytes in some models, i32 sequence id
            u32 whether values are transposed, u32 layers
            for each layer: i32 type of the keys, u64 bytes of a row, a row for each cell
            for each layer, if values are not transposed: as for the keys
            for each layer, if they are: i32 type of the values, u32 bytes of an element, u32 elements of a row,
                                         for each element of a row: that element of each cell

Where the cells come from, and in which order they are, does not matter to llama.cpp: it reads the positions, looks for
free cells, and ignores the sequence ids. Models whose positions have several dimensions (M-RoPE), and those that look
at the tokens before, have more of each cell: i32 x, i32 y, i32 token id. Values are transposed in contexts without
flash attention, which read only states of their kind.
"""

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caravan_shard.arrays import Ids, Rows, State

MAGIC = 0xAF143CD8
_HEAD = struct.Struct("<Ii")
_U32 = struct.Struct("<I")
_LAYERS = struct.Struct("<II")
_TENSOR = struct.Struct("<iQ")
# It has the length of _TENSOR, so that the size of a state does not depend on the form.
_TRANSPOSED = struct.Struct("<iII")
# The elements of a row by ggml type: f32, f16 and bf16. No other type can be transposed.
_ELEMENTS: dict[int, np.dtype[np.unsignedinteger[Any]]] = {0: np.dtype("<u4"), 1: np.dtype("<u2"), 30: np.dtype("<u2")}
_EXTRA_BYTES = 12


def _cell(extra_bytes: int) -> np.dtype[np.void]:
    return np.dtype([("position", "<i4"), ("id_count", "<u4"), ("extra", "u1", (extra_bytes,)), ("sequence_id", "<i4")])


# More than any real one has.
_MAX_LAYERS = 4096
MAX_ROW_BYTES = 1 << 26
_MAX_TENSOR_TYPE = 255


class StateError(Exception):
    """These bytes are no state of the expected format."""


def state_head() -> bytes:
    """Return what every state begins with."""
    return _HEAD.pack(MAGIC, 0)


@dataclass(frozen=True, slots=True)
class TensorFormat:
    """The ggml type of a tensor, and the size of the row that it has for each cell."""

    kind: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The tensors of one cache. ``extra_bytes``: what a cell has beside its position and its rows."""

    keys: tuple[TensorFormat, ...]
    values: tuple[TensorFormat, ...]
    extra_bytes: int = 0

    @property
    def cell(self) -> np.dtype[np.void]:
        """What a state has of each cell before the rows."""
        return _cell(self.extra_bytes)

    @property
    def row_bytes(self) -> int:
        """The rows of one cell in all tensors, in bytes."""
        return sum(tensor.row_bytes for tensor in (*self.keys, *self.values))

    def block_bytes(self, streams: int, cells: int) -> int:
        """The size of the cache's part of a state."""
        head = _U32.size * (1 + streams)
        if cells == 0:
            return head
        tensors = _TENSOR.size * (len(self.keys) + len(self.values))
        return head + _LAYERS.size + tensors + cells * (self.cell.itemsize + self.row_bytes)


@dataclass(frozen=True, slots=True)
class CacheCells:
    """Cells of one cache: their positions [cells], and a row for each cell in each tensor, keys first.

    Rows are [cells, bytes], or [cells, elements] where they come from transposed values. ``extras`` is [cells, bytes].
    """

    positions: Ids
    rows: list[Rows]
    extras: State

    def cut(self, start: int, end: int) -> "CacheCells":
        """Return the cells of the positions [start, end), in order; raises StateError if one is missing."""
        wanted = np.arange(start, end, dtype=np.int32)
        first = int(np.searchsorted(self.positions, start))
        if np.array_equal(self.positions[first : first + len(wanted)], wanted):
            found = slice(first, first + len(wanted))
            return CacheCells(wanted, [rows[found] for rows in self.rows], self.extras[found])
        # The positions are not in order.
        order = np.argsort(self.positions, kind="stable")
        order = order[np.searchsorted(self.positions, start, sorter=order) :][: len(wanted)]
        if not np.array_equal(self.positions[order], wanted):
            raise StateError(f"not all cells from {start} to {end} are there")
        return CacheCells(wanted, [rows[order] for rows in self.rows], self.extras[order])


@dataclass(frozen=True, slots=True)
class StateFormat:
    """The caches of a model."""

    caches: tuple[CacheFormat, ...]

    def state_bytes(self, streams: int, cells: int) -> int:
        """The size of a state with ``cells`` cells in every cache."""
        return _HEAD.size + sum(cache.block_bytes(streams, cells) for cache in self.caches)

    def parse(self, state: State) -> list[CacheCells]:
        """Return the cells of each cache, as views; raises StateError."""
        reader = _Reader(state)
        reader.head()
        cells = [reader.cache(cache) for cache in self.caches]
        reader.finish()
        return cells

    def build(
        self, parts: Sequence[Sequence[CacheCells]], streams: int, state: State, *, transposes: bool = False
    ) -> None:
        """Write a state. ``parts`` has cells for each cache; ``state`` has the right size, see `state_bytes`.

        ``transposes``: write the values transposed, which is possible if they are of a type with single elements.
        """
        writer = _Writer(state, transposes=transposes)
        writer.write(_HEAD, MAGIC, 0)
        for cache, cells in zip(self.caches, parts, strict=True):
            writer.cache(cache, cells, streams)
        assert writer.at == state.nbytes, f"{writer.at} of {state.nbytes} bytes"


def find_format(state: State) -> StateFormat | None:
    """Find the format of a model from the state of a sequence with a few cells; None if this module knows it not."""
    reader = _Reader(state)
    try:
        reader.head()
        found = next(_formats(state, reader.at), None)
        if found is None:
            return None
        form = StateFormat(found)
        parsed = form.parse(state)
        again = np.empty_like(state)
        form.build([[cells] for cells in parsed], reader.streams_at(_HEAD.size), again)
    except (StateError, AssertionError):
        return None
    cells = len(parsed[0].positions)
    complete = all(sorted(part.positions.tolist()) == list(range(cells)) for part in parsed)
    return form if cells > 0 and complete and len(again) == len(state) else None


def _formats(state: State, at: int) -> Iterator[tuple[CacheFormat, ...]]:
    """Yield the ways to read the bytes from ``at`` on as caches."""
    if at == state.nbytes:
        yield ()
        return
    # Some models have no values, and few have more of a cell.
    for has_values, extra_bytes in itertools.product((True, False), (0, _EXTRA_BYTES)):
        reader = _Reader(state, at)
        try:
            cache = reader.find_cache(has_values=has_values, extra_bytes=extra_bytes)
        except StateError:
            continue
        for others in _formats(state, reader.at):
            yield (cache, *others)


class _Reader:
    """Reads a state from ``at`` on; every method raises StateError if the bytes are not what it expects."""

    def __init__(self, state: State, at: int = 0) -> None:
        self._state = state
        self.at = at

    def head(self) -> None:
        magic, _sequence_id = self._read(_HEAD)
        if magic != MAGIC:
            raise StateError("no state of a sequence")

    def streams_at(self, at: int) -> int:
        return int(_U32.unpack_from(self._state.data, at)[0])

    def finish(self) -> None:
        if self.at != self._state.nbytes:
            raise StateError(f"{self._state.nbytes - self.at} bytes too many")

    def cache(self, cache: CacheFormat) -> CacheCells:
        """Read the cells of a cache, which is known."""
        positions, extras, streams_after = self._cells(cache.cell)
        if len(positions) == 0:
            empty = [np.empty((0, tensor.row_bytes), np.uint8) for tensor in (*cache.keys, *cache.values)]
            return CacheCells(positions, empty, extras)
        layers, transposed = self._layers()
        if layers != len(cache.keys):
            raise StateError("another number of layers")
        found = [self._tensor(len(positions)) for _ in cache.keys]
        read_values = self._transposed_tensor if transposed else self._tensor
        found += [read_values(len(positions)) for _ in cache.values]
        if tuple(tensor for tensor, _ in found) != (*cache.keys, *cache.values):
            raise StateError("another type or size of a tensor")
        self._skip_empty(streams_after)
        return CacheCells(positions, [rows for _, rows in found], extras)

    def find_cache(self, *, has_values: bool, extra_bytes: int) -> CacheFormat:
        """Read a cache that is not known; at least one cell is needed for that."""
        positions, _, streams_after = self._cells(_cell(extra_bytes))
        if len(positions) == 0:
            raise StateError("no cells")
        layers, transposed = self._layers()
        if not 0 < layers <= _MAX_LAYERS:
            raise StateError(f"{layers} layers")
        keys = tuple(self._tensor(len(positions))[0] for _ in range(layers))
        read_values = self._transposed_tensor if transposed else self._tensor
        values = tuple(read_values(len(positions))[0] for _ in range(layers)) if has_values else ()
        self._skip_empty(streams_after)
        return CacheFormat(keys, values, extra_bytes)

    def _cells(self, cell: np.dtype[np.void]) -> tuple[Ids, State, int]:
        """Read the positions and extras of a cache's cells; also return how many streams follow those of the cells."""
        (streams,) = self._read(_U32)
        for stream in range(streams):
            (count,) = self._read(_U32)
            if count:
                cells = self._bytes(count * cell.itemsize).view(cell)
                if np.any(cells["id_count"] != 1):
                    raise StateError("cells of an unknown format")
                return np.ascontiguousarray(cells["position"], np.int32), cells["extra"], streams - stream - 1
        return np.empty(0, np.int32), np.empty((0, cell["extra"].itemsize), np.uint8), 0

    def _layers(self) -> tuple[int, bool]:
        """Read the number of layers, and whether the values are transposed."""
        transposed, layers = self._read(_LAYERS)
        if transposed > 1:
            raise StateError("values are neither transposed nor not")
        return layers, bool(transposed)

    def _tensor(self, cells: int) -> tuple[TensorFormat, Rows]:
        kind, row_bytes = self._read(_TENSOR)
        _check_tensor(kind, row_bytes)
        return TensorFormat(kind, row_bytes), self._bytes(cells * row_bytes).reshape(cells, row_bytes)

    def _transposed_tensor(self, cells: int) -> tuple[TensorFormat, Rows]:
        kind, element_bytes, elements = self._read(_TRANSPOSED)
        _check_tensor(kind, element_bytes * elements)
        element = _ELEMENTS.get(kind)
        if element is None or element.itemsize != element_bytes:
            raise StateError(f"type {kind} with {element_bytes} bytes cannot be transposed")
        values = self._bytes(cells * elements * element_bytes).view(element)
        return TensorFormat(kind, elements * element_bytes), values.reshape(elements, cells).T

    def _skip_empty(self, streams: int) -> None:
        for _ in range(streams):
            if self._read(_U32) != (0,):
                raise StateError("cells in two streams")

    def _read(self, part: struct.Struct) -> tuple[int, ...]:
        at = self.at
        self._bytes(part.size)
        return part.unpack_from(self._state.data, at)

    def _bytes(self, size: int) -> State:
        if self.at + size > self._state.nbytes:
            raise StateError("the state is truncated")
        self.at += size
        return self._state[self.at - size : self.at]


def _check_tensor(kind: int, row_bytes: int) -> None:
    if not (0 <= kind <= _MAX_TENSOR_TYPE and 0 < row_bytes <= MAX_ROW_BYTES):
        raise StateError(f"no tensor: type {kind}, {row_bytes} bytes")


class _Writer:
    def __init__(self, state: State, *, transposes: bool) -> None:
        self._state = state
        self._transposes = transposes
        self.at = 0

    def cache(self, cache: CacheFormat, parts: Sequence[CacheCells], streams: int) -> None:
        positions = np.concatenate([part.positions for part in parts])
        self.write(_U32, streams)
        self.write(_U32, len(positions))
        if len(positions):
            cells = np.zeros(len(positions), cache.cell)
            cells["position"] = positions
            cells["extra"] = np.concatenate([part.extras for part in parts])
            cells["id_count"] = 1
            self._put(cells.view(np.uint8))
            self.write(_LAYERS, int(self._transposes), len(cache.keys))
            for index, tensor in enumerate((*cache.keys, *cache.values)):
                rows = [part.rows[index] for part in parts]
                if self._transposes and index >= len(cache.keys):
                    self._put_transposed(tensor, rows, len(positions))
                else:
                    self._put_tensor(tensor, rows)
        # llama.cpp reads the cells of any stream into that of the sequence.
        for _ in range(streams - 1):
            self.write(_U32, 0)

    def write(self, part: struct.Struct, *values: int) -> None:
        part.pack_into(self._state.data, self.at, *values)
        self.at += part.size

    def _put_tensor(self, tensor: TensorFormat, parts: list[Rows]) -> None:
        self.write(_TENSOR, tensor.kind, tensor.row_bytes)
        for rows in parts:
            self._put(rows)

    def _put_transposed(self, tensor: TensorFormat, parts: list[Rows], cells: int) -> None:
        element = _ELEMENTS[tensor.kind]
        elements = tensor.row_bytes // element.itemsize
        self.write(_TRANSPOSED, tensor.kind, element.itemsize, elements)
        by_cell = self._next(cells * tensor.row_bytes).view(element).reshape(elements, cells).T
        np.concatenate([rows.view(element) for rows in parts], out=by_cell)

    def _put(self, rows: Rows) -> None:
        self._next(rows.nbytes).view(rows.dtype).reshape(rows.shape)[:] = rows

    def _next(self, size: int) -> State:
        self.at += size
        return self._state[self.at - size : self.at]
