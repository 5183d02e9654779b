"""What the router and its rendering processes say to each other: JSON after its length in four bytes."""

from typing import Any

import msgspec

LENGTH_BYTES = 4


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``time_limit_s``: after it the process ends itself. ``max_bytes``: of the text, in UTF-8."""

    source: str
    variables: dict[str, Any]
    time_limit_s: float
    max_bytes: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``text``, or what was wrong: ``problem``, or ``given_bytes`` of text where it had to stop."""

    text: str | None = None
    problem: str | None = None
    given_bytes: int | None = None


def framed(message: msgspec.Struct) -> bytes:
    """One message as it is sent."""
    body = msgspec.json.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body
