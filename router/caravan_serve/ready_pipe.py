"""Says whether a child process has begun to listen."""

import asyncio
import os


class ReadyPipe:
    """A pipe into which the child writes a byte. Used on the event loop; whoever makes it closes it.

    What was written can be read after the child has ended. A socket's file cannot serve for this: a child that ends
    removes it, and one that lives for a moment is never seen to have it.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self._reading, self.descriptor = os.pipe()
        os.set_blocking(self._reading, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether the child has listened. Once it has ended this is final."""
        self._read()
        return self._is_ready

    def hand_over(self) -> None:
        """Close the end that the child has by now, ``descriptor``."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def close(self) -> None:
        """Close the pipe. `is_ready` stays as it is."""
        self.hand_over()
        self._end_reading()

    def _read(self) -> None:
        if self._reading < 0:
            return
        try:
            data = os.read(self._reading, 1)
        except BlockingIOError:
            return
        self._is_ready = bool(data)
        self._end_reading()

    def _end_reading(self) -> None:
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
