"""The messages between the router and its rendering processes, in JSON."""

from typing import Any

import msgspec


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The rendered text may have ``max_bytes`` bytes of UTF-8."""

    source: str
    variables: dict[str, Any]
    max_bytes: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of three: the rendered ``text``, a ``problem`` of the template, or ``given_bytes`` when it was too long."""

    text: str | None = None
    problem: str | None = None
    given_bytes: int | None = None
