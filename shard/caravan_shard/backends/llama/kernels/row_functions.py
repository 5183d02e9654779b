"""What calls of the functions have in common that builds by `deploy/setup` add to llama.cpp's backends for CPUs."""

import ctypes
from typing import Any

from numpy.typing import NDArray

from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries


def library_with(name: str) -> ctypes.CDLL | None:
    """Return the library of this build of llama.cpp that has the function; None if none has it."""
    return next((library for library in cpu_libraries() if hasattr(library, name)), None)


def address_of(values: NDArray[Any] | None) -> int:
    """Return the address of ``values``, which are contiguous; 0 for None."""
    if values is None:
        return 0
    # The attribute `ctypes` takes longer.
    address: int = values.__array_interface__["data"][0]
    return address
