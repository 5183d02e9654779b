"""Computes log probabilities with the function of `shard/kernels`."""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.row_functions import address_of, library_with
from caravan_shard.sampling.logprobs import JointLogprobs, LogprobRow, TokenLogprobs, leave_all_logprobs

_FUNCTION = "caravan_logprob_rows"
# Must be `struct caravan_logprob_row` of `shard/kernels/src/logprob_rows.c`.
_ROW = struct.Struct("@3q")
_LEFT = -1


class LlamaJointLogprobs:
    """A JointLogprobs. It lets other threads run meanwhile."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError if ``library`` does not have the function."""
        function: Any = getattr(library, _FUNCTION)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = (pointer, number, pointer, number, pointer, pointer)
        function.restype = None
        self._function = function

    def __call__(self, logits: Floats, rows: Sequence[LogprobRow]) -> list[TokenLogprobs | None]:
        """Return the log probabilities of each of ``rows``; None if it is left."""
        assert logits.flags.c_contiguous, "rows of logits must follow each other"
        given = b"".join([_ROW.pack(row.place, row.token, row.top_n) for row in rows])
        values = len(rows) + sum([row.top_n for row in rows])
        all_ids, all_logprobs = np.empty(values, np.int32), np.empty(values)
        self._function(
            address_of(logits), logits.shape[1], given, len(rows), address_of(all_ids), address_of(all_logprobs)
        )
        ids, logprobs = all_ids.tolist(), all_logprobs.tolist()
        found: list[TokenLogprobs | None] = []
        start = 0
        for row in rows:
            end = start + 1 + row.top_n
            known = TokenLogprobs(logprobs[start], ids[start + 1 : end], logprobs[start + 1 : end], [])
            found.append(None if ids[start] == _LEFT else known)
            start = end
        return found


def find_joint_logprobs() -> JointLogprobs:
    """Return the function; if there is none, one that leaves all rows."""
    library = library_with(_FUNCTION)
    return leave_all_logprobs if library is None else LlamaJointLogprobs(library)
