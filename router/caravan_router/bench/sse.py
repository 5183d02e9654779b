"""Server-sent events over bytes that may be split anywhere."""


class SseParser:
    """Feed bytes, get the ``data`` of each completed event; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that ``chunk`` completes, in order."""
        lines = (self._pending + chunk).split(b"\n")
        # What follows the last newline is an unfinished line, often empty.
        self._pending = lines.pop()
        # Neither API spreads one JSON document over several data lines, so that a line is an event.
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
