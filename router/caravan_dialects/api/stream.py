"""Streams of messages as values: how JSON messages are framed on them, and what a reply sends them to."""

from dataclasses import dataclass
from typing import Protocol

# NEL, LS and PS may stand unescaped in JSON, but many clients' line readers end a line at them.
_LINE_ENDS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


@dataclass(frozen=True, slots=True)
class Framing:
    """How JSON messages are framed on a stream.

    ``keep_alive``: bytes that readers ignore; None if the format has none. ``end``: what closes the stream.
    """

    content_type: str
    before: bytes
    after: bytes
    keep_alive: bytes | None = None
    end: bytes = b""

    def frame(self, data: bytes) -> bytes:
        """Return one message. ``data`` is JSON, so that nothing in it can end the message."""
        if not data.isascii() and (b"\xe2\x80" in data or b"\xc2\x85" in data):
            for raw, escaped in _LINE_ENDS.items():
                data = data.replace(raw, escaped)
        return self.before + data + self.after


SERVER_SENT = Framing("text/event-stream", b"data: ", b"\n\n", keep_alive=b":\n\n")
# Messages are made by `named`.
NAMED_EVENTS = Framing("text/event-stream", b"event: ", b"\n\n", keep_alive=b":\n\n")
# One JSON object a line. Clients parse every line, even an empty one, so there is no keep-alive.
LINES = Framing("application/x-ndjson", b"", b"\n")


def named(event: str, data: bytes) -> bytes:
    """Return a message of `NAMED_EVENTS`: the name of an event, and its data as JSON."""
    return event.encode() + b"\ndata: " + data


def data_of(message: bytes) -> bytes:
    """Return the JSON of a message that `named` made."""
    return message.partition(b"\ndata: ")[2]


class Events(Protocol):
    """The stream of one client."""

    async def send(self, *messages: bytes) -> None:
        """Write JSON ``messages``, if any. Raises ConnectionError when the client has disconnected."""
        ...
