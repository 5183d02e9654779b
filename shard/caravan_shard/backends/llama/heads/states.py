"""The hidden states that llama.cpp computes, and those that a head needs of them.

llama.cpp hands them out by C++ functions (``src/llama-ext.h``). They are called by their mangled names, as in
`devices/measure.py`: a function with other parameters has another name, so a build that lacks these has no drafts.
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libllama
from numpy.typing import NDArray

from caravan_shard.arrays import Floats, Ids
from caravan_shard.backends.base import TokenBatch

_SET, _GET = "_Z26llama_set_embeddings_nextnP13llama_contextbb", "_Z26llama_get_embeddings_nextnP13llama_context"
_SET_INPUT = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_GET_INPUT = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"

# Room for the hidden states of tokens that the head has not read, all sequences together.
_STATE_BYTES = 64 << 20
_LEAST_STATES = 64
# Most tokens of a draft.
_MOST_DRAFTED = 64


def can_get_states() -> bool:
    """Whether this build of llama.cpp has the functions."""
    return hasattr(libllama, _SET) and hasattr(libllama, _GET)


def can_get_inputs() -> bool:
    """Whether this build of llama.cpp has the functions for the inputs of layers, too."""
    return can_get_states() and hasattr(libllama, _SET_INPUT) and hasattr(libllama, _GET_INPUT)


@cache
def _function(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function whose first argument is a context."""
    function = libllama[name]
    function.argtypes, function.restype = [ctypes.c_void_p, *arguments], result
    return function


def compute_states(context: Any) -> None:
    """Let a context hand out the hidden states of all tokens from now on."""
    _function(_SET, None, ctypes.c_bool, ctypes.c_bool)(context, True, False)


def computed_states(context: Any, rows: int, size: int) -> Floats:
    """Return the hidden states [rows, size] of the last forward pass; a view of llama.cpp's own buffer."""
    pointer = _function(_GET, ctypes.POINTER(ctypes.c_float))(context)
    assert pointer, "the last forward pass had no hidden states"
    found: Floats = np.ctypeslib.as_array(pointer, (rows, size))
    return found


def compute_inputs(context: Any, layers: Sequence[int]) -> None:
    """Let a context hand out what ``layers`` read of all tokens from now on. Its graph must have them."""
    for layer in layers:
        _function(_SET_INPUT, None, ctypes.c_uint32, ctypes.c_bool)(context, layer, True)


def computed_inputs(context: Any, layers: Sequence[int], rows: int, size: int) -> Floats:
    """Return what ``layers`` read in the last forward pass, side by side: [rows, layers * size]."""
    found = []
    for layer in layers:
        pointer = _function(_GET_INPUT, ctypes.POINTER(ctypes.c_float), ctypes.c_uint32)(context, layer)
        found.append(np.ctypeslib.as_array(pointer, (rows, size)))
    return np.concatenate(found, axis=1)


def _kept_states(sequences: int, size: int, longest: int) -> int:
    """Return of how many last tokens of each sequence states are kept."""
    return min(longest, max(_LEAST_STATES, _STATE_BYTES // (4 * size * sequences)))


def state_bytes(sequences: int, size: int, longest: int) -> int:
    """Return the room of `KeptStates` in bytes."""
    return 4 * size * sequences * (_kept_states(sequences, size, longest) + _MOST_DRAFTED)


class KeptStates:
    """The hidden states that the model has computed for the last tokens of each sequence, by position."""

    def __init__(self, sequences: int, size: int, longest: int, *, reads_first: bool, lag: int = 1) -> None:
        """``size``: floats of a state. ``longest``: most tokens of a sequence.

        ``lag``: how many tokens before the one that the head reads a state is. ``reads_first``: the head reads the
        first token of a sequence, too, without a state.
        """
        self._reads_first = reads_first
        self._lag = lag
        self._kept = _kept_states(sequences, size, longest)
        # The state at a position is in the row of its remainder. Those of drafts come behind the kept ones.
        self._rows = self._kept + _MOST_DRAFTED
        self._states = np.zeros((sequences, self._rows, size), np.float32)
        # Those of each sequence are at the positions [first, end).
        self._first = np.zeros(sequences, np.int64)
        self._end = np.zeros(sequences, np.int64)

    def note(self, batch: TokenBatch, states: Floats) -> None:
        """Keep the states [rows, size] of what the model has computed; those at later positions are void."""
        # Not by np.unique: this runs between any two passes.
        rows = np.flatnonzero(np.diff(batch.sequence_ids, prepend=-1))
        ids, counts = batch.sequence_ids[rows], np.diff(rows, append=len(batch.sequence_ids))
        starts = batch.positions[rows]
        ends = starts + counts
        follows = (self._first[ids] <= starts) & (starts <= self._end[ids])
        self._first[ids] = np.maximum(np.where(follows, self._first[ids], starts), ends - self._kept)
        self._end[ids] = ends
        if batch.media:
            # The head reads tokens only. What it reads next is the token behind the last cell of the medium.
            self._first[ids] = ends - self._lag
        kept = batch.positions >= np.repeat(ends - self._kept, counts)
        self.put(batch.sequence_ids[kept], batch.positions[kept], states[kept])

    def put(self, ids: Ids, positions: Ids, states: Floats) -> None:
        """Write states at positions of sequences. Those of a head may have fewer floats."""
        self._states[ids, positions % self._rows, : states.shape[1]] = states

    def read(self, ids: Ids, positions: Ids) -> Floats:
        """Return the states [rows, size] that belong to positions of sequences; zeros where there is none."""
        found: Floats = self._states[ids, (positions - self._lag) % self._rows]
        found[positions < self._lag] = 0.0
        return found

    def are_computed(self, ids: Ids, positions: Ids) -> NDArray[np.bool_]:
        """Return whether the model has computed the states of positions of sequences: others are of drafts."""
        return positions - self._lag < self._end[ids]

    def readable(self, sequence_id: int) -> range:
        """Return the positions that can be read: those with states, and the next token, before which a draft begins."""
        first = int(self._first[sequence_id])
        without_state = self._reads_first and first == 0
        return range(0 if without_state else first + self._lag, int(self._end[sequence_id]) + 1)

    def forget(self) -> None:
        """Keep no states of any sequence."""
        self._first[:] = self._end[:] = 0

    def cut(self, sequence_id: int, length: int) -> None:
        """Keep no states from the position ``length`` on."""
        self._end[sequence_id] = min(self._end[sequence_id], length)
        self._first[sequence_id] = min(self._first[sequence_id], length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Let a sequence begin with the states of another before the position ``length``."""
        self._states[destination_id] = self._states[source_id]
        self._first[destination_id], self._end[destination_id] = self._first[source_id], self._end[source_id]
        self.cut(destination_id, length)
