"""Errors a client sees, and one table of what each becomes on the wire."""

import math
from dataclasses import dataclass
from enum import Enum

from caravan_router.conversations.store import StoreError
from caravan_router.core.errors import (
    DeadlineError,
    GenerationError,
    IncompleteGenerationError,
    NoShardError,
    QueueTimeoutError,
    TextTooLongError,
)
from caravan_router.metrics.recorder import Failure

RETRY_AFTER_S = 1


class RequestError(Exception):
    """The request cannot be served. TABLE says what each subclass becomes on the wire."""


class MalformedRequestError(RequestError):
    """The request is not valid HTTP/1.1."""

    def __init__(self, reason: str) -> None:
        # aiohttp's parser quotes the bytes it could not read, over several lines.
        super().__init__(f"The request is not valid HTTP/1.1: {reason.partition(chr(10))[0][:200].rstrip(': ')}")


class MalformedBodyError(RequestError):
    """The body is not JSON."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The request body is not valid JSON: {reason}")


class UnsupportedMediaError(RequestError):
    """The content type is not JSON."""

    def __init__(self, content_type: str) -> None:
        super().__init__(f"Expected a request with `Content-Type: application/json`. Given: {content_type}")


class UnsupportedCodingError(RequestError):
    """The content coding is neither gzip nor deflate."""

    def __init__(self, coding: str) -> None:
        super().__init__(f"Bodies may have `Content-Encoding: gzip` or `deflate`, or none. Given: {coding[:80]}")


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request body must be here within {limit_s:g} s")


class BodyTooLargeError(RequestError):
    """The decompressed body is too large."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body must be at most {limit_bytes} bytes, decompressed")


class ValidationError(RequestError):
    """A field is unknown, missing, or breaks a rule. ``field`` is "" when the error concerns the whole body."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"Input validation error: {message}")
        self.field = field


class BodyMismatchError(ValidationError):
    """A field that is unknown, missing or of the wrong type."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)


class ChatTemplateError(RequestError):
    """The model's chat template cannot render the messages. The prefix is TGI's."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Template error: {reason}")


class ToolError(RequestError):
    """The tools cannot be used as asked."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Tool error: {reason}")


class MissingKeyError(RequestError):
    """The route needs an API key and none was sent."""

    def __init__(self) -> None:
        super().__init__("An API key is needed here: send it as `Authorization: Bearer KEY`")


class InvalidKeyError(RequestError):
    """The API key is unknown."""

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided")


class ForbiddenError(RequestError):
    """The route is for operators, and the API key is not an operator's."""

    def __init__(self) -> None:
        super().__init__("This route needs the API key of an operator: its entry must have `operator = true`")


class NotLocalError(RequestError):
    """The route is for operators, there are no API keys, and the request does not come from a program on this host."""

    def __init__(self) -> None:
        super().__init__(
            "Without API keys, this route answers programs on the router's host only, neither proxies nor web pages. "
            "For others, start the router with --api-keys-file and send the key of an operator"
        )


class RateLimitedError(RequestError):
    """The API key made too many requests per minute."""

    def __init__(self, limit_per_minute: int, wait_s: float) -> None:
        self.retry_after_s = math.ceil(wait_s)
        super().__init__(
            f"This API key may make {limit_per_minute} requests per minute. Try again in {self.retry_after_s} s"
        )


class KeyConcurrencyError(RequestError):
    """The API key has too many generations running."""

    def __init__(self, limit: int, given: int) -> None:
        super().__init__(
            f"This API key may have {limit} generations under way. Asked for beside those that are: {given}"
        )


class OverloadedError(RequestError):
    """The model has too many generations running."""

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class NotFoundError(RequestError):
    """There is no such route."""

    def __init__(self, path: str) -> None:
        super().__init__(f"Not found: {path[:200]}")


class MethodNotAllowedError(RequestError):
    """The route does not take this method."""

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"Method {method} is not allowed here. Allowed: {allowed}")
        self.allowed = allowed


class ExpectationError(RequestError):
    """``Expect`` is not ``100-continue``."""

    def __init__(self, given: str) -> None:
        super().__init__(f"`Expect` may be `100-continue`. Given: {given[:80]}")


class TooManyConnectionsError(RequestError):
    """Too many connections are open."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"Too many connections: {limit} may be open")


class AbortedError(RequestError):
    """The client ended the request with ``DELETE /v1/requests/{id}``."""

    def __init__(self) -> None:
        super().__init__("The request was aborted by `DELETE /v1/requests/{id}`")


class UnknownRequestError(RequestError):
    """No request in progress has this id."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"No request of this API key is in progress under this id. Given: {request_id[:128]}")


class UnknownEntryError(RequestError):
    """The API key has no response or conversation of this id, or the conversation no such item."""

    def __init__(self, kind: str, entry_id: str) -> None:
        super().__init__(f"There is no {kind} of this id. Given: {entry_id[:128]}")


class ConversationBusyError(RequestError):
    """A response or another change of the conversation is under way."""

    def __init__(self) -> None:
        super().__init__("A response or a change of this conversation is under way: wait for its end, or fork it")


class HeadMovedError(RequestError):
    """The head of the conversation is not where the client or the response expected it."""

    def __init__(self) -> None:
        super().__init__("The head of the conversation has moved: read it again, and repeat what still fits")


class NotStoredError(RequestError):
    """A response was generated and could not be stored."""

    def __init__(self) -> None:
        super().__init__("The response could not be stored, so that it cannot be continued")


class ContextLengthError(RequestError):
    """The input does not fit the model's context. Agents look for its code, and then shorten what they send."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"The input does not fit the context: {reason.removeprefix('Input validation error: ')}")
        self.field = "input"


class UnknownShardError(RequestError):
    """No shard of this name is up."""

    def __init__(self, name: str) -> None:
        super().__init__(f"No shard of this name is up. Given: {name[:200]}")


class UnknownModelError(RequestError):
    """No model and no adapter of this name is served."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model does not exist: GET /v1/models lists those that do. Given: {name[:200]}")
        self.field = "model"


class UnhealthyError(RequestError):
    """``/health`` found no shard that is up and makes progress."""

    def __init__(self) -> None:
        super().__init__("unhealthy")


class ErrorFamily(Enum):
    """The party that caused an error. OpenAI's coarse error types derive from it."""

    CLIENT = "client"
    RATE = "rate"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """The form of an error on the wire.

    ``status`` and ``error_type`` are TGI's; other dialects derive theirs. ``meaning`` explains the error in the
    documentation. ``failure``: label of the failure metric; None for errors that are not counted.
    """

    status: int
    error_type: str
    family: ErrorFamily
    meaning: str
    failure: Failure | None = None
    retry_after_s: int | None = None


_CLIENT, _RATE, _SERVER = ErrorFamily.CLIENT, ErrorFamily.RATE, ErrorFamily.SERVER
_RULE = "A field is unknown, missing, or breaks a rule. The message names the field, the limit and the value given"

# The most specific entry along the bases of an exception's class counts.
TABLE: dict[type[Exception], ErrorKind] = {
    MalformedRequestError: ErrorKind(400, "validation", _CLIENT, "The request is not valid HTTP/1.1"),
    MalformedBodyError: ErrorKind(400, "validation", _CLIENT, "The body is not valid JSON"),
    UnsupportedMediaError: ErrorKind(415, "validation", _CLIENT, "The content type is not JSON"),
    UnsupportedCodingError: ErrorKind(415, "validation", _CLIENT, "The content coding is neither gzip nor deflate"),
    BodyTimeoutError: ErrorKind(408, "request_timeout", _CLIENT, "The body did not arrive in time"),
    BodyTooLargeError: ErrorKind(413, "validation", _CLIENT, "The decompressed body is too large"),
    ValidationError: ErrorKind(422, "validation", _CLIENT, _RULE, Failure.VALIDATION),
    ContextLengthError: ErrorKind(
        422,
        "context_length_exceeded",
        _CLIENT,
        "`/v1/responses`: the input does not fit the model's context",
        Failure.VALIDATION,
    ),
    ChatTemplateError: ErrorKind(
        422, "template_error", _CLIENT, "The model's chat template cannot render the messages", Failure.TEMPLATE
    ),
    ToolError: ErrorKind(422, "tool_error", _CLIENT, "The tools cannot be used as asked", Failure.VALIDATION),
    TextTooLongError: ErrorKind(
        422, "validation", _CLIENT, "The text is longer than the shard tokenizes in one call", Failure.VALIDATION
    ),
    MissingKeyError: ErrorKind(401, "invalid_api_key", _CLIENT, "The route needs an API key and none was sent"),
    InvalidKeyError: ErrorKind(401, "invalid_api_key", _CLIENT, "The API key is unknown"),
    ForbiddenError: ErrorKind(403, "forbidden", _CLIENT, "The route is for operators, and the API key is not one's"),
    NotLocalError: ErrorKind(
        403, "forbidden", _CLIENT, "The route is for operators, there are no API keys, and another host asks"
    ),
    RateLimitedError: ErrorKind(
        429, "overloaded", _RATE, "The API key made too many requests per minute", Failure.RATE_LIMITED, RETRY_AFTER_S
    ),
    KeyConcurrencyError: ErrorKind(
        429, "overloaded", _RATE, "The API key has too many generations running", Failure.RATE_LIMITED, RETRY_AFTER_S
    ),
    OverloadedError: ErrorKind(
        429, "overloaded", _RATE, "The model has too many generations running", Failure.OVERLOADED, RETRY_AFTER_S
    ),
    QueueTimeoutError: ErrorKind(
        429, "overloaded", _RATE, "The request waited in the queue for too long", Failure.QUEUE_TIMEOUT, RETRY_AFTER_S
    ),
    DeadlineError: ErrorKind(
        504, "deadline_exceeded", _SERVER, "The request did not end within its `timeout`", Failure.DEADLINE
    ),
    NotFoundError: ErrorKind(404, "not_found", _CLIENT, "There is no such route"),
    UnknownRequestError: ErrorKind(404, "not_found", _CLIENT, "The API key has no request of this id in progress"),
    UnknownModelError: ErrorKind(
        404, "model_not_found", _CLIENT, "No model or adapter of this name is served", Failure.VALIDATION
    ),
    UnknownEntryError: ErrorKind(404, "not_found", _CLIENT, "The API key has no such response, conversation or item"),
    ConversationBusyError: ErrorKind(
        409,
        "conversation_busy",
        _CLIENT,
        "A response or a change of the conversation is under way",
        retry_after_s=RETRY_AFTER_S,
    ),
    HeadMovedError: ErrorKind(409, "head_moved", _CLIENT, "The head of the conversation is not where it was expected"),
    StoreError: ErrorKind(
        503,
        "store_unavailable",
        _SERVER,
        "Responses and conversations cannot be read or written, for example because the disk is full",
        retry_after_s=RETRY_AFTER_S,
    ),
    NotStoredError: ErrorKind(500, "not_stored", _SERVER, "A response was generated and could not be stored"),
    UnknownShardError: ErrorKind(404, "not_found", _CLIENT, "No shard of this name is up"),
    # Many clients retry a 409.
    AbortedError: ErrorKind(
        410, "aborted", _CLIENT, "The request was aborted by `DELETE /v1/requests/{id}`", Failure.ABORTED
    ),
    MethodNotAllowedError: ErrorKind(405, "method_not_allowed", _CLIENT, "The route does not take this method"),
    ExpectationError: ErrorKind(417, "validation", _CLIENT, "`Expect` is not `100-continue`"),
    TooManyConnectionsError: ErrorKind(
        503, "overloaded", _SERVER, "Too many connections are open", retry_after_s=RETRY_AFTER_S
    ),
    UnhealthyError: ErrorKind(503, "healthcheck", _SERVER, "`/health`: no shard is up and makes progress"),
    NoShardError: ErrorKind(503, "no_shard", _SERVER, "No shard is up", Failure.GENERATION, RETRY_AFTER_S),
    IncompleteGenerationError: ErrorKind(
        500, "incomplete_generation", _SERVER, "The token stream ended without a finish reason", Failure.INCOMPLETE
    ),
    GenerationError: ErrorKind(
        424, "generation", _SERVER, "A generation that had started could not continue", Failure.GENERATION
    ),
}
INTERNAL = ErrorKind(500, "internal", _SERVER, "The router failed; its log says why")


def kind_of(error: Exception) -> ErrorKind:
    """Return the entry of TABLE for ``error``, INTERNAL if there is none."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def message_of(error: Exception) -> str:
    """Return the sentence that clients see."""
    match error:
        case RequestError():
            return str(error)
        case TextTooLongError():
            return f"Input validation error: {error}"
        case StoreError():
            return "Responses and conversations cannot be read or written now"
        case NoShardError():
            return "No shard is up"
        case QueueTimeoutError():
            return f"Model is overloaded: {error}"
        case DeadlineError():
            return f"Deadline exceeded: {error}"
        case IncompleteGenerationError():
            return "Incomplete generation"
        case GenerationError():
            return f"Request failed during generation: {error}"
        case _:
            # The cause goes to the log only: it may name paths and hosts.
            return "Internal server error"


def headers_of(error: Exception) -> dict[str, str]:
    """Return the response headers that belong to ``error``."""
    match error:
        case RateLimitedError():
            return {"Retry-After": str(error.retry_after_s)}
        case MissingKeyError():
            return {"WWW-Authenticate": "Bearer"}
        case InvalidKeyError():
            return {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        case MethodNotAllowedError():
            return {"Allow": error.allowed}
        case _:
            retry_after_s = kind_of(error).retry_after_s
            return {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


def ends_connection(error: Exception) -> bool:
    """Return whether the rest of the connection's bytes cannot be read as a request."""
    return isinstance(error, MalformedRequestError | BodyTimeoutError)
