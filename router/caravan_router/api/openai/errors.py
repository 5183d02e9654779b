"""OpenAI's error envelope: ``{"error": {"message", "type", "param", "code"}}``."""

import msgspec

from caravan_router.api.dialect import Dialect
from caravan_router.api.errors import (
    TABLE,
    ContextLengthError,
    ErrorFamily,
    ErrorKind,
    KeyConcurrencyError,
    RateLimitedError,
    ToolError,
    UnknownModelError,
    ValidationError,
    kind_of,
    message_of,
)

_TYPES = {
    ErrorFamily.CLIENT: "invalid_request_error",
    ErrorFamily.RATE: "rate_limit_error",
    ErrorFamily.SERVER: "server_error",
}
# OpenAI has a code of its own for these; everywhere else ``code`` is TGI's ``error_type``.
_RATE_LIMITS = (TABLE[RateLimitedError], TABLE[KeyConcurrencyError])
# The errors that name a field.
_NAMED = ValidationError | UnknownModelError | ContextLengthError | ToolError


class OpenAIError(msgspec.Struct, frozen=True):
    """``param`` names the offending field. ``code`` is TGI's ``error_type``, except for ``rate_limit_exceeded``."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's envelope."""

    error: OpenAIError


def openai_status(kind: ErrorKind) -> int:
    """Return OpenAI's status: 400 where TGI has 422."""
    return 400 if kind.status == 422 else kind.status


def openai_type(kind: ErrorKind) -> str:
    """Return OpenAI's coarse ``type``."""
    return _TYPES[kind.family]


def openai_code(kind: ErrorKind) -> str:
    """Return OpenAI's ``code``."""
    return "rate_limit_exceeded" if kind in _RATE_LIMITS else kind.error_type


def _body(error: Exception, _request_id: str) -> bytes:
    kind = kind_of(error)
    param = error.field or None if isinstance(error, _NAMED) else None
    return msgspec.json.encode(
        OpenAIErrorBody(OpenAIError(message_of(error), openai_type(kind), param, openai_code(kind)))
    )


OPENAI = Dialect(name="OpenAI", envelope=OpenAIErrorBody, status=openai_status, body=_body)
