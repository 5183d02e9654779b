"""Reads the errors that a server answers with."""

import math
from collections.abc import Mapping

import msgspec

from caravan.client.errors import (
    AbortedError,
    ApiError,
    AuthenticationError,
    ContextLengthError,
    ConversationBusyError,
    ErrorDetails,
    ForbiddenError,
    HeadMovedError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotStoredError,
    OverloadedError,
    RateLimitError,
    ServerDeadlineError,
    ServerGenerationError,
    UnavailableError,
)

# The codes that are listed in docs/http-api.md.
_BY_CODE: Mapping[str, type[ApiError]] = {
    "aborted": AbortedError,
    "context_length_exceeded": ContextLengthError,
    "conversation_busy": ConversationBusyError,
    "deadline_exceeded": ServerDeadlineError,
    "forbidden": ForbiddenError,
    "generation": ServerGenerationError,
    "head_moved": HeadMovedError,
    "healthcheck": UnavailableError,
    "incomplete_generation": ServerGenerationError,
    "constraint_failed": ServerGenerationError,
    "internal": InternalError,
    "library": InvalidRequestError,
    "invalid_api_key": AuthenticationError,
    "method_not_allowed": InvalidRequestError,
    "model_not_found": NotFoundError,
    "model_replaced": UnavailableError,
    "no_shard": UnavailableError,
    "not_found": NotFoundError,
    "not_stored": NotStoredError,
    "overloaded": OverloadedError,
    "rate_limit_exceeded": RateLimitError,
    "request_timeout": InvalidRequestError,
    "store_unavailable": UnavailableError,
    "template_error": InvalidRequestError,
    "tool_error": InvalidRequestError,
    "validation": InvalidRequestError,
}
# Answers of proxies have no code.
_BY_STATUS: Mapping[int, type[ApiError]] = {
    401: AuthenticationError,
    403: ForbiddenError,
    404: NotFoundError,
    429: OverloadedError,
    502: UnavailableError,
    503: UnavailableError,
    504: UnavailableError,
}
# Of an answer that is not an error of Caravan's, in characters.
_SHOWN = 200


class _Body(msgspec.Struct):
    message: str
    type: str = ""
    param: str | None = None
    code: str | None = None


class _Envelope(msgspec.Struct):
    error: _Body


def read_failure(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """Return the error of an answer. ``headers`` finds names in any case."""
    try:
        error = msgspec.json.decode(body, type=_Envelope).error
    except msgspec.MsgspecError:
        text = " ".join(body.decode("utf-8", "replace").split())[:_SHOWN]
        error = _Body(message=f"the server answered with status {status}: {text or 'nothing'}")
    request_id, retry_after_s = headers.get("x-request-id", ""), _seconds(headers.get("retry-after", ""))
    return _failure(status, error, request_id, retry_after_s)


def read_event_failure(event: str, request_id: str) -> ApiError | None:
    """Return the error in an event of a stream; None if the event is no error."""
    try:
        return _failure(None, msgspec.json.decode(event, type=_Envelope).error, request_id, None)
    except msgspec.MsgspecError:
        return None


def response_failure(code: str, message: str, request_id: str) -> ApiError:
    """Return the error with which a streamed response failed."""
    return _failure(None, _Body(message=message, code=code), request_id, None)


def _failure(status: int | None, error: _Body, request_id: str, retry_after_s: float | None) -> ApiError:
    details = ErrorDetails(
        status=status,
        code=error.code or "",
        type=error.type,
        param=error.param or "",
        request_id=request_id,
        retry_after_s=retry_after_s,
    )
    kind = _BY_CODE.get(error.code or "") or _kind_by_status(status)
    return kind(error.message, details)


def _kind_by_status(status: int | None) -> type[ApiError]:
    if status is None or status < 400:
        return ApiError
    return _BY_STATUS.get(status) or (InvalidRequestError if status < 500 else InternalError)


def _seconds(text: str) -> float | None:
    """Return the value of Retry-After; None for a date, which Caravan does not send."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None
