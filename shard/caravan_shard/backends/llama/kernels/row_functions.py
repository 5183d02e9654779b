"""What calls of the functions of `shard/kernels` have in common."""

import ctypes
from typing import Any

from numpy.typing import NDArray

from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries, row_library


def library_with(name: str) -> ctypes.CDLL | None:
    """Return the library that has the function, of this build of llama.cpp if it can be; None if none has it."""
    found = next((library for library in cpu_libraries() if hasattr(library, name)), None)
    if found is None and (rows := row_library()) is not None and hasattr(rows, name):
        return rows
    return found


def address_of(values: NDArray[Any] | None) -> int:
    """Return the address of ``values``, which are contiguous; 0 for None."""
    if values is None:
        return 0
    # The attribute `ctypes` takes longer.
    address: int = values.__array_interface__["data"][0]
    return address
