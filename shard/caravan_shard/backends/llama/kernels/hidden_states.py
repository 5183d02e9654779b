"""Takes the last hidden states of a pass, and spares the logits that llama.cpp computes from them.

A function of `shard/kernels` reads them and ends the graph there (`ggml_backend_sched_eval_callback`).
"""

import ctypes
from typing import Any

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.row_functions import library_with

_FUNCTION = "caravan_take_states"


class _States(ctypes.Structure):
    """Must be `struct caravan_states` of `shard/kernels/src/take_states.c`."""

    _fields_ = (("rows", ctypes.c_void_p), ("room", ctypes.c_int64), ("taken", ctypes.c_int64))


def can_take_states() -> bool:
    """Whether this build of llama.cpp has the function."""
    return library_with(_FUNCTION) is not None


class HiddenStates:
    """Room for the states of the outputs of one pass. Must live as long as the context that it is given to."""

    def __init__(self, rows: int, size: int) -> None:
        """``size``: floats of a state. This build must be one that can take them."""
        library = library_with(_FUNCTION)
        assert library is not None, f"this build has no {_FUNCTION}"
        self._function = getattr(library, _FUNCTION)
        self._values = np.zeros((rows, size), np.float32)
        self._states = _States(self._values.ctypes.data, self._values.nbytes, 0)

    def give_to(self, parameters: Any) -> None:
        """Let a context with these ``llama_context_params`` put its states here."""
        parameters.cb_eval = ctypes.cast(self._function, type(parameters.cb_eval))
        parameters.cb_eval_user_data = ctypes.addressof(self._states)

    def take(self, rows: int) -> Floats | None:
        """Return the states [rows, size] of the last pass, once; None unless it had states for that many outputs."""
        values, taken = self._values[:rows], self._states.taken
        self._states.taken = 0
        return values if taken == values.nbytes else None
