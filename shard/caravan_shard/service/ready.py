"""Reports to the program that started this one that the shard listens."""

import contextlib
import os

from caravan_shard.backends.base import StartupError


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
