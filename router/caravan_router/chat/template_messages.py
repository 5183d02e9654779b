"""The messages between the router and its rendering processes: JSON after its length in four bytes."""

from typing import Any

import msgspec

LENGTH_BYTES = 4


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The process ends itself after ``time_limit_s``. The rendered text may have ``max_bytes`` bytes of UTF-8."""

    source: str
    variables: dict[str, Any]
    time_limit_s: float
    max_bytes: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of three: the rendered ``text``, a ``problem`` of the template, or ``given_bytes`` when it was too long."""

    text: str | None = None
    problem: str | None = None
    given_bytes: int | None = None


def framed(message: msgspec.Struct) -> bytes:
    """Return the bytes of one message, length included."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
