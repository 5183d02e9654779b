"""What a shard owes to the program that started it: to end with it, and to report that it listens."""

import contextlib
import ctypes
import os
import signal
import sys

from caravan_shard.startup_error import StartupError

_PR_SET_PDEATHSIG = 1


# The variable by which a program tells one that it starts who its parent is.
PARENT_PID = "CARAVAN_PARENT_PID"


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. Linux only; else raise StartupError.

    The signal is SIGKILL, because nobody is left to wait for a drain. A parent that names itself in PARENT_PID may also
    have ended before this call.
    """
    if sys.platform != "linux":
        raise StartupError("--exit-with-parent works on Linux only")
    parent = int(os.environ.pop(PARENT_PID, os.getppid()))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise StartupError(f"prctl failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        # The parent ended before the call above.
        os.kill(os.getpid(), signal.SIGKILL)


def report_ready(descriptor: int) -> None:
    """Write a newline to ``descriptor`` and close it. Raises StartupError if it is not open for writing.

    A byte in a pipe can be read after this process has ended, so that a shard that listened only for a moment is known
    to have listened.
    """
    try:
        # Whoever started the shard may not wait for it any more.
        with contextlib.suppress(BrokenPipeError):
            os.write(descriptor, b"\n")
        os.close(descriptor)
    except OSError as error:
        raise StartupError(f"cannot write to --ready-fd {descriptor}: {error.strerror}") from error
