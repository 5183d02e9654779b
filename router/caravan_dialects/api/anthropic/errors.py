"""Anthropic's error envelope: ``{"type": "error", "error": {"type", "message"}, "request_id"}``, OpenAI's statuses.

But an exceeded budget is a ``billing_error`` with 402, as Anthropic's own: its clients try again after 429.
"""

import msgspec

from caravan_dialects.api.anthropic.rules import ThreadError
from caravan_dialects.api.error_table import TABLE, Dialect, kind_of, message_of
from caravan_dialects.api.errors import BudgetError, ErrorFamily, ErrorKind
from caravan_dialects.api.generation.rules import PromptTooLongError, PromptTooManyBytesError, TotalTooLongError
from caravan_dialects.api.openai.errors import openai_status

_BUDGET = TABLE[BudgetError]
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(msgspec.Struct, frozen=True):
    """Distinguishes errors of one type in Anthropic's packages."""

    error_code: str


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str
    details: AnthropicErrorDetails | msgspec.UnsetType = msgspec.UNSET


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    """Anthropic's envelope."""

    type: str
    error: AnthropicError
    request_id: str


def anthropic_type(kind: ErrorKind) -> str:
    """Return Anthropic's ``type``."""
    if kind is _BUDGET:
        return "billing_error"
    default = "invalid_request_error" if kind.family is ErrorFamily.CLIENT else "api_error"
    return _TYPES.get(kind.status, default)


def _status(kind: ErrorKind) -> int:
    return 402 if kind is _BUDGET else openai_status(kind)


def _message(error: Exception) -> str:
    """Return the sentence that clients see. Agents know those of Anthropic for what does not fit the context."""
    match error:
        case TotalTooLongError(new_field=new_field, limit=limit, given=given, given_new=new):
            return (
                f"input length and `{new_field}` exceed context limit: {given} + {new} > {limit}, decrease input "
                f"length or `{new_field}` and try again"
            )
        case PromptTooLongError(limit=limit, given=given):
            return f"prompt is too long: {given} tokens > {limit} maximum"
        case PromptTooManyBytesError(limit=limit, given=given):
            return f"prompt is too long: {given} bytes > {limit} maximum"
        case _:
            return message_of(error)


def _body(error: Exception, request_id: str) -> bytes:
    details = AnthropicErrorDetails(error.code) if isinstance(error, ThreadError) else msgspec.UNSET
    described = AnthropicError(anthropic_type(kind_of(error)), _message(error), details)
    return msgspec.json.encode(AnthropicErrorBody("error", described, request_id))


ANTHROPIC = Dialect(name="Anthropic", envelope=AnthropicErrorBody, status=_status, body=_body, id_header="Request-Id")
