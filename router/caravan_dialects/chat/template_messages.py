"""The messages between the router and its rendering processes, in JSON."""

from typing import Any

import msgspec


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The rendered text may have ``max_bytes`` bytes of UTF-8. ``names``: the variables are asked for, not a text."""

    source: str
    variables: dict[str, Any]
    max_bytes: int
    names: bool = False


class RenderReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of four: the rendered ``text``, a ``problem`` of the template, ``given_bytes`` when it was too long, or
    ``names``: those of the variables that the template reads.
    """

    text: str | None = None
    problem: str | None = None
    given_bytes: int | None = None
    names: list[str] | None = None
