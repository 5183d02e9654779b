"""Checks that the code of `deploy/setup` in this build of llama.cpp is called as it wants to be."""

import ctypes
from collections.abc import Sequence

from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries

# Must be CARAVAN_KERNELS_ABI of `deploy/setup/abi.c`.
KERNELS_ABI = 1

_FUNCTION = "caravan_kernels_abi"
# What a build has that is older than the number.
_OLDEST = "caravan_row_by_row"


def check_kernels(libraries: Sequence[ctypes.CDLL] | None = None) -> None:
    """Raise StartupError if this build has another version of our code than the shard calls; it may have none of it.

    ``libraries``: those that may have it; by default all of this process. llama.cpp must be initialized.
    """
    for library in cpu_libraries() if libraries is None else libraries:
        found = _abi_of(library)
        if found not in {None, KERNELS_ABI}:
            raise StartupError(
                f"llama.cpp was built with version {found} of Caravan's kernels, but this shard calls version "
                f"{KERNELS_ABI}: in a checkout `make run` builds it again, elsewhere reinstall llama-cpp-python"
            )


def _abi_of(library: ctypes.CDLL) -> int | None:
    """Return the number of the code in ``library``: 0 if it is older than the number; None if there is no such code."""
    if hasattr(library, _FUNCTION):
        return int(library[_FUNCTION]())
    return 0 if hasattr(library, _OLDEST) else None
