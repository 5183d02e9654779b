"""OpenAI's error envelope: ``{"error": {"message", "type", "param", "code"}}``."""

import msgspec

from caravan_dialects.api.error_table import TABLE, Dialect, kind_of, message_of
from caravan_dialects.api.errors import (
    BudgetError,
    ContextLengthError,
    ErrorFamily,
    ErrorKind,
    KeyConcurrencyError,
    RateLimitedError,
    ToolError,
    UnknownModelError,
    ValidationError,
)
from caravan_dialects.api.generation.rules import (
    PromptTooLongError,
    PromptTooManyBytesError,
    TotalTooLongError,
)

_TYPES = {
    ErrorFamily.CLIENT: "invalid_request_error",
    ErrorFamily.RATE: "rate_limit_error",
    ErrorFamily.SERVER: "server_error",
}
# The errors that name a field.
_NAMED = ValidationError | UnknownModelError | ToolError
# OpenAI has a code of its own for these; everywhere else ``code`` is TGI's ``error_type``.
_CODES = {
    TABLE[RateLimitedError]: "rate_limit_exceeded",
    TABLE[KeyConcurrencyError]: "rate_limit_exceeded",
    TABLE[ContextLengthError]: "context_length_exceeded",
}


class OpenAIError(msgspec.Struct, frozen=True):
    """``param`` names the offending field. ``code`` is TGI's ``error_type``, except for ``rate_limit_exceeded`` and
    ``context_length_exceeded``."""

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
    """Return OpenAI's coarse ``type``, which is the code of an exceeded budget."""
    return kind.error_type if kind is TABLE[BudgetError] else _TYPES[kind.family]


def openai_code(kind: ErrorKind) -> str:
    """Return OpenAI's ``code``."""
    return _CODES.get(kind, kind.error_type)


def openai_message(error: Exception) -> str:
    """Return the sentence that clients see. Agents know those of OpenAI for what does not fit the context."""
    match error:
        case TotalTooLongError(limit=limit, given=given, given_new=new):
            name = _called(error.field)
            return (
                f"{_longest(limit)} However, you requested {given + new} tokens ({given} in the {name}, {new} in the "
                f"completion). Please reduce the length of the {name} or completion."
            )
        case PromptTooLongError(limit=limit, given=given, total=total):
            return _too_long(error.field, total or limit, f"{given} tokens", limit)
        case PromptTooManyBytesError(limit=limit, given=given, total=total):
            return _too_long(error.field, total, f"{given} bytes", limit)
        case _:
            return message_of(error)


def _too_long(field: str, total: int, given: str, limit: int) -> str:
    name = _called(field)
    resulted = f"However, your {name} resulted in {given}, and at most {limit} are allowed."
    return f"{_longest(total)} {resulted} Please reduce the length of the {name}."


def _called(field: str) -> str:
    # OpenAI's word for what the prompt of a chat is made of.
    return "messages" if field == "messages" else f"`{field}`"


def _longest(tokens: int) -> str:
    return f"This model's maximum context length is {tokens} tokens."


def openai_error(error: Exception) -> OpenAIError:
    """Return what the envelope has of ``error``."""
    kind = kind_of(error)
    param = (error.field or None) if isinstance(error, _NAMED) else None
    return OpenAIError(openai_message(error), openai_type(kind), param, openai_code(kind))


def _body(error: Exception, _request_id: str) -> bytes:
    return msgspec.json.encode(OpenAIErrorBody(openai_error(error)))


OPENAI = Dialect(name="OpenAI", envelope=OpenAIErrorBody, status=openai_status, body=_body)
