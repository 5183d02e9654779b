"""Finds which of Caravan's kernels (`shard/kernels`) there are, and checks that they are called as they want to be."""

import ctypes
import logging
from collections.abc import Sequence

import llama_cpp

from caravan_proto.messages.model import Kernels
from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries, row_library
from caravan_shard.backends.llama.kernels.row_by_row import has_own_kernels
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

# Must be CARAVAN_KERNELS_ABI of `shard/kernels/src/abi.c`.
KERNELS_ABI = 1

_FUNCTION = "caravan_kernels_abi"
# What a build has that is older than the number.
_OLDEST = "caravan_row_by_row"
_SLOWER = {Kernels.STOCK: "attention on CPUs and sampling are slower", Kernels.SAMPLING: "attention on CPUs is slower"}


def warn_of_missing_kernels() -> None:
    """Log a warning if this process lacks kernels, with the command that gets them. llama.cpp must be initialized."""
    kernels = installed_kernels()
    if kernels in _SLOWER:
        _log.warning(
            "llama.cpp was built without Caravan's kernels: %s; `caravan build-llama` builds it with them",
            _SLOWER[kernels],
            extra={"kernels": kernels.value},
        )


def loaded_kernels() -> Kernels:
    """Initialize llama.cpp, and return which kernels this process has. Raises StartupError as `check_kernels`."""
    llama_cpp.llama_backend_init()
    check_kernels()
    return installed_kernels()


def installed_kernels() -> Kernels:
    """Return which kernels this process has. llama.cpp must be initialized."""
    if has_own_kernels():
        return Kernels.OWN
    return Kernels.STOCK if row_library() is None else Kernels.SAMPLING


def check_kernels(libraries: Sequence[ctypes.CDLL] | None = None, rows: ctypes.CDLL | None = None) -> None:
    """Raise StartupError if this process has another version of our code than the shard calls; it may have none of it.

    ``libraries``: those of llama.cpp that may have it, and ``rows`` the package of its own; by default all of this
    process. llama.cpp must be initialized.
    """
    if libraries is None:
        libraries, rows = cpu_libraries(), row_library()
    for library in libraries:
        found = _abi_of(library)
        if found not in {None, KERNELS_ABI}:
            raise StartupError(
                f"llama.cpp was built with version {found} of Caravan's kernels, but this shard calls version "
                f"{KERNELS_ABI}: in a checkout `make run` builds it again, elsewhere `caravan build-llama`"
            )
    if rows is not None and (found := _abi_of(rows)) != KERNELS_ABI:
        raise StartupError(
            f"llama-caravan-kernels has version {found} of Caravan's kernels, but this shard calls version "
            f"{KERNELS_ABI}: install the release of that package that belongs to this shard, or uninstall it"
        )


def _abi_of(library: ctypes.CDLL) -> int | None:
    """Return the number of the code in ``library``: 0 if it is older than the number; None if there is no such code."""
    if hasattr(library, _FUNCTION):
        return int(library[_FUNCTION]())
    return 0 if hasattr(library, _OLDEST) else None
