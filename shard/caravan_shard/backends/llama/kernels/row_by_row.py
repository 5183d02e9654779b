"""Switches off the kernels of ggml's CPU backend that compute several rows of a product together.

They add in another order than the kernels for a single row. Builds with `shard/kernels` have a variable for it
(`src/row_by_row.c`), which is that of the whole process.
"""

import ctypes
import logging

from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

_VARIABLE = "caravan_row_by_row"


class RowByRow:
    """How all models of this process compute, and how many are open."""

    def __init__(self) -> None:
        self._open = 0
        self._exact = False

    def acquire(self, *, exact: bool) -> None:
        """Let a model compute row by row if it is ``exact``; raises StartupError if open models do otherwise."""
        if self._open and exact != self._exact:
            raise StartupError(
                "the models of one process compute all exactly or none: close the others first, or use another process"
            )
        if not self._open and exact != self._exact:
            variables = _variables()
            if exact and not variables:
                _log.info("this build of llama.cpp cannot switch off its kernels for several rows")
            for variable in variables:
                variable.value = exact
        self._open += 1
        self._exact = exact

    def release(self) -> None:
        """Note that a model is closed."""
        self._open -= 1


ROW_BY_ROW = RowByRow()


def has_own_kernels() -> bool:
    """Whether llama.cpp was built with `shard/kernels`: with the variable, and with our flash attention for CPUs."""
    return bool(_variables())


def _variables() -> list[ctypes.c_int]:
    """Return the variable of each library that has it."""
    found = {}
    for library in cpu_libraries():
        try:
            variable = ctypes.c_int.in_dll(library, _VARIABLE)
        except ValueError:
            continue
        found[ctypes.addressof(variable)] = variable
    return list(found.values())
