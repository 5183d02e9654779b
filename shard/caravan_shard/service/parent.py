"""Ends this process together with the one that started it."""

import ctypes
import os
import signal
import sys

from caravan_shard.backends.base import StartupError

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; else raise StartupError.

    The signal is SIGKILL, because nobody is left to wait for a drain.
    """
    if sys.platform != "linux":
        raise StartupError("--exit-with-parent works on Linux only")
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise StartupError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # The parent ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)
