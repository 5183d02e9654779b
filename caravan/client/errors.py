"""The errors of a client: a type for each kind of answer and for what goes wrong on the way, and how they are read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from caravan import errors
from caravan.errors import CaravanError, DeadlineError, GenerationError, RequestError

# Of an answer that is not an error of Caravan's, in characters.
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDetails:
    """What a server says of an error.

    ``status``: the HTTP status; None if the error ended a stream. ``code`` and ``type``: the server's words, "" if the
    answer has none, as a proxy's. ``param``: the field that broke a rule, "" if there is none. ``request_id``: the
    answer's X-Request-Id, by which the server's log names the request. ``retry_after_s``: seconds after which the
    server expects the request again; None if it names none.
    """

    status: int | None = None
    code: str = ""
    type: str = ""
    param: str = ""
    request_id: str = ""
    retry_after_s: float | None = None


class ApiError(CaravanError):
    """The server answered with an error. Its message is the server's; ``details`` has the rest.

    ApiError
     +-- InvalidRequestError      the request breaks a rule: nothing was computed (also a RequestError)
     |    +-- ContextLengthError  it does not fit the model's context (also a caravan.ContextLengthError)
     +-- AuthenticationError      the API key is missing or unknown
     +-- ForbiddenError           the API key may not do this
     +-- NotFoundError            there is no such model, conversation, item or route
     +-- ConversationBusyError    a response or a change of the conversation is under way
     +-- HeadMovedError           the conversation is not where ``if_match`` or the response expected it
     +-- AbortedError             the request was aborted by its id (also a GenerationError)
     +-- OverloadedError          the server has no room for the request now
     |    +-- RateLimitError      the API key makes too many requests
     +-- UnavailableError         no shard is up, or a proxy cannot reach the server
     +-- ServerDeadlineError      the request did not end within its ``timeout`` (also a DeadlineError)
     +-- ServerGenerationError    a generation that had started could not continue (also a GenerationError)
     +-- NotStoredError           a response was generated and could not be stored
     +-- InternalError            the server failed; its log says why
    """

    def __init__(self, message: str, details: ErrorDetails | None = None) -> None:
        super().__init__(message)
        self.details = details or ErrorDetails()


class InvalidRequestError(ApiError, RequestError):
    """The request breaks a rule, which the message names. Nothing was computed."""


class ContextLengthError(InvalidRequestError, errors.ContextLengthError):
    """The prompt, or the prompt and its output, does not fit the model's context: make it shorter."""


class AuthenticationError(ApiError):
    """The API key is missing or unknown."""


class ForbiddenError(ApiError):
    """The API key may not do this."""


class NotFoundError(ApiError):
    """There is no such model, conversation, item or route for this API key."""


class ConversationBusyError(ApiError):
    """A response or a change of the conversation is under way. Nothing has changed: wait for its end, or fork it."""


class HeadMovedError(ApiError):
    """The conversation is not where ``if_match`` or the response expected it. Nothing has changed."""


class AbortedError(ApiError, GenerationError):
    """The request was aborted by its id, with ``DELETE /v1/requests/{id}``."""


class OverloadedError(ApiError):
    """The server has no room for the request now. Nothing was computed."""


class RateLimitError(OverloadedError):
    """The API key made too many requests, or has too many generations under way or no tokens left."""


class UnavailableError(ApiError):
    """No shard is up, the server cannot read or write its store, or a proxy cannot reach the server."""


class ServerDeadlineError(ApiError, DeadlineError):
    """The request did not end within its ``timeout``."""


class ServerGenerationError(ApiError, GenerationError):
    """A generation that had started could not continue."""


class NotStoredError(ApiError):
    """A response was generated and could not be stored, so that the conversation did not get it."""


class InternalError(ApiError):
    """The server failed; its log says why."""


class ServerConnectionError(CaravanError, ConnectionError):
    """The connection to the server failed.

    ServerConnectionError
     +-- UnreachableError     there was no connection: nothing was computed
     +-- ConnectionLostError  it ended before the reply did: how far the request came is unknown
    """


class UnreachableError(ServerConnectionError):
    """There was no connection to the server, so that nothing was computed."""


class ConnectionLostError(ServerConnectionError):
    """The connection ended before the reply did. How far the request came is unknown."""


class BadReplyError(CaravanError, ValueError):
    """The reply is none of Caravan's. Is the URL that of a Caravan server?"""


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
    "helper_failed": UnavailableError,
    "incomplete_generation": ServerGenerationError,
    "constraint_failed": ServerGenerationError,
    "insufficient_quota": RateLimitError,
    "internal": InternalError,
    "library": InvalidRequestError,
    "invalid_api_key": AuthenticationError,
    "method_not_allowed": InvalidRequestError,
    "model_not_found": NotFoundError,
    "model_replaced": UnavailableError,
    "no_events": InvalidRequestError,
    "no_shard": UnavailableError,
    "not_found": NotFoundError,
    "not_stored": NotStoredError,
    "overloaded": OverloadedError,
    "previous_response_not_found": NotFoundError,
    "rate_limit_exceeded": RateLimitError,
    "request_repeated": UnavailableError,
    "request_timeout": InvalidRequestError,
    "response_ended": InvalidRequestError,
    "store_unavailable": UnavailableError,
    "template_error": InvalidRequestError,
    "tool_error": InvalidRequestError,
    "unavailable": UnavailableError,
    "upgrade_required": InvalidRequestError,
    "validation": InvalidRequestError,
    "websocket_connection_limit_reached": InvalidRequestError,
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
