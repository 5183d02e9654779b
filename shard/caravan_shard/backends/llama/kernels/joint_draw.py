"""Draws rows with the function of `shard/kernels`."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.devices.devices import find_devices
from caravan_shard.backends.llama.kernels.row_functions import address_of, library_with
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.joint_draw import JointDraw, Row, leave_all

_FUNCTION = "caravan_choose_tokens"
# Must be `struct caravan_row` of `shard/kernels/include/row.h`.
_ROW = struct.Struct("@qN8d")
# Where devices compute the layers: more threads would take longer to wake up.
_MOST_BESIDE_DEVICES = 8


class LlamaJointDraw:
    """A JointDraw. It lets other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        """``threads``: how many share the rows. Raises AttributeError if ``library`` does not have the function."""
        function: Any = getattr(library, _FUNCTION)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (pointer, number, pointer, number, pointer, number)
        function.restype = None
        self._function = function
        self.threads = threads

    def __call__(self, logits: Floats, rows: Sequence[Row]) -> list[int]:
        """Return the token of each of ``rows``, or LEFT."""
        assert logits.flags.c_contiguous, "rows of logits must follow each other"
        given = b"".join(
            [_ROW.pack(row.place, address_of(row.mask), row.number, row.xtc_threshold, *row.filters) for row in rows]
        )
        tokens = np.empty(len(rows), np.int32)
        self._function(address_of(logits), logits.shape[1], given, len(rows), address_of(tokens), self.threads)
        found: list[int] = tokens.tolist()
        return found


def draw_threads(config: ShardConfig) -> int:
    """Return how many threads share the rows of a draw; llama.cpp must be initialized."""
    if config.sampling_threads > 1:
        # Each of those would have such threads of its own.
        return 1
    has_devices = config.uses_gpus and find_devices()
    # On CPUs as many as compute layers: OpenMP ends those that one team has more than the next.
    return min(config.decode_threads, _MOST_BESIDE_DEVICES) if has_devices else config.decode_threads


def find_joint_draw(threads: int) -> JointDraw:
    """Return the function; if there is none, one that leaves all rows."""
    library = library_with(_FUNCTION)
    return leave_all if library is None else LlamaJointDraw(library, threads)
