"""The two error envelopes."""

import msgspec


class ErrorBody(msgspec.Struct, frozen=True):
    """TGI's: ``error_type`` is stable, ``error`` is for people."""

    error: str
    error_type: str


class OpenAIError(msgspec.Struct, frozen=True):
    """``param`` names the offending field; ``code`` is TGI's ``error_type`` but for ``rate_limit_exceeded``."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's."""

    error: OpenAIError
