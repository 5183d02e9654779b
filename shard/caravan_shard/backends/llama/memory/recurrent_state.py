"""Checks llama.cpp's states of models with recurrent layers before llama.cpp reads them.

Such a state begins as `cell_state` describes, with the cells of the layers that attend, if there are any. Then follows
the recurrent state, which has the same size whatever the length of the sequence:

    u32 cells (1), i32 position of the last token, u32 number of sequence ids (0)
    u32 whether states are transposed (0), u32 layers
    for each recurrent layer: i32 type, u64 bytes of a row, the row, which is what its convolution remembers
    for each recurrent layer: i32 type, u64 bytes of a row, the row, which is its state
"""

import struct
from dataclasses import dataclass

import numpy as np

from caravan_shard.arrays import State
from caravan_shard.backends.llama.memory.cell_state import (
    MAX_ROW_BYTES,
    CacheCells,
    StateError,
    StateFormat,
    find_format,
    state_head,
)

_HEAD_BYTES = len(state_head())
_META = struct.Struct("<IiIII")
_POSITION_BYTES = slice(4, 8)
_ROW = struct.Struct("<iQ")
# Types whose bytes are numbers of any value: f32, f16 and bf16.
_TYPES = {0, 1, 30}


@dataclass(frozen=True, slots=True)
class RecurrentFormat:
    """``attention``: the cells of layers that attend; None without such layers.

    ``block_bytes``: the size of the recurrent state. ``fixed``: the bytes in it that no state has otherwise, by place.
    """

    attention: StateFormat | None
    block_bytes: int
    fixed: tuple[tuple[int, bytes], ...]

    def cells_bytes(self, streams: int, cells: int) -> int:
        """The size of a state of ``cells`` cells without recurrent state."""
        return _HEAD_BYTES if self.attention is None else self.attention.state_bytes(streams, cells)

    def parse(self, state: State) -> list[CacheCells]:
        """Return the cells of each cache that attends, of a state without the recurrent one; raises StateError."""
        if self.attention is not None:
            return self.attention.parse(state)
        if state.tobytes() != state_head():
            raise StateError("cells without layers that attend")
        return []

    def check(self, block: State, last: int) -> None:
        """Raise StateError unless ``block`` is the recurrent state after a token at the position ``last``."""
        if block.nbytes != self.block_bytes or any(
            block[at : at + len(found)].tobytes() != found for at, found in self.fixed
        ):
            raise StateError("another recurrent state")
        if int(block[_POSITION_BYTES].view("<i4")[0]) != last:
            raise StateError("a recurrent state of another length")


def find_recurrent_format(state: State, block: State) -> RecurrentFormat | None:
    """Find the format from a state of a few tokens and from its recurrent part; None if this module knows it not."""
    head, block = block[:_HEAD_BYTES], block[_HEAD_BYTES:]
    cells = state[: state.nbytes - block.nbytes]
    if head.nbytes != _HEAD_BYTES or not np.array_equal(state[cells.nbytes :], block):
        return None
    attention = find_format(cells) if cells.nbytes > _HEAD_BYTES else None
    fixed = _fixed_bytes(block)
    if fixed is None or (attention is None and cells.nbytes != _HEAD_BYTES):
        return None
    return RecurrentFormat(attention, block.nbytes, fixed)


def _fixed_bytes(block: State) -> tuple[tuple[int, bytes], ...] | None:
    """Return what is no number of a state, nor its position; None if ``block`` is not of the known form."""
    if block.nbytes < _META.size:
        return None
    cells, _, ids, transposed, _ = _META.unpack_from(block.data)
    if (cells, ids, transposed) != (1, 0, 0):
        return None
    found = [(0, block[:4].tobytes()), (8, block[8 : _META.size].tobytes())]
    at = _META.size
    while at < block.nbytes:
        if at + _ROW.size > block.nbytes:
            return None
        kind, row_bytes = _ROW.unpack_from(block.data, at)
        if kind not in _TYPES or not 0 <= row_bytes <= MAX_ROW_BYTES:
            return None
        found.append((at, block[at : at + _ROW.size].tobytes()))
        at += _ROW.size + row_bytes
    return tuple(found) if at == block.nbytes else None
