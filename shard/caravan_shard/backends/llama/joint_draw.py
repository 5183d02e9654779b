"""Draws rows with the function that builds by `deploy/setup` add to llama.cpp's backends for CPUs."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.cpu_libraries import cpu_libraries
from caravan_shard.sampling.joint_draw import JointDraw, Row, leave_all

_FUNCTION = "caravan_draw_rows"
# Must be `struct caravan_row` of `deploy/setup/draw_rows.c`.
_ROW = struct.Struct("@qN7d")


class LlamaJointDraw:
    """A JointDraw. It lets other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError if ``library`` does not have the function."""
        function: Any = getattr(library, _FUNCTION)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (pointer, number, pointer, number, pointer)
        function.restype = None
        self._function = function

    def __call__(self, logits: Floats, rows: Sequence[Row]) -> list[int]:
        """Return the token of each of ``rows``, or LEFT."""
        assert logits.flags.c_contiguous, "rows of logits must follow each other"
        given = b"".join(
            [_ROW.pack(row.place, _address(row.mask), row.number, row.xtc_threshold, *row.filters) for row in rows]
        )
        tokens = np.empty(len(rows), np.int32)
        self._function(_address(logits), logits.shape[1], given, len(rows), _address(tokens))
        found: list[int] = tokens.tolist()
        return found


def find_joint_draw() -> JointDraw:
    """Return the function of this build of llama.cpp; if it has none, one that leaves all rows."""
    for library in cpu_libraries():
        if hasattr(library, _FUNCTION):
            return LlamaJointDraw(library)
    return leave_all


def _address(values: NDArray[Any] | None) -> int:
    """Return the address of ``values``, which are contiguous; 0 for None."""
    if values is None:
        return 0
    # The attribute `ctypes` takes longer.
    address: int = values.__array_interface__["data"][0]
    return address
