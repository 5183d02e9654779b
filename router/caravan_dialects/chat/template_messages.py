"""The messages between the router and its rendering processes, in JSON, and the errors of templates."""

from typing import Any

import msgspec


class TemplateError(Exception):
    """The template cannot render this conversation, or the model has no template."""


class TemplateOutputError(TemplateError):
    """The template renders more text than is allowed."""

    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        super().__init__(f"its text has more than {limit_bytes} bytes. Given: at least {given_bytes}")
        self.limit_bytes = limit_bytes
        self.given_bytes = given_bytes


class TemplateStoppedError(TemplateError):
    """The template took too much time or memory."""


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
