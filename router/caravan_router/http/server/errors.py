"""Errors a client sees, and the one table of what each becomes on TGI's routes and on OpenAI's."""

import math
from dataclasses import dataclass

import msgspec
from aiohttp import web

from caravan_router.core.errors import DeadlineError, GenerationError, NoShardError, QueueTimeoutError, TextTooLongError
from caravan_router.http.server.error_bodies import ErrorBody, OpenAIError, OpenAIErrorBody
from caravan_router.metrics.recorder import Failure
from caravan_router.text.generation import IncompleteGenerationError

RETRY_AFTER_S = 1


class RequestError(Exception):
    """The request cannot be served as it is. The first line of each kind's docstring is what the README says of it."""


class MalformedRequestError(RequestError):
    """The request is not HTTP/1.1."""

    def __init__(self, reason: str) -> None:
        # The reader quotes what it could not read, over several lines.
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
    """The body is compressed in a way that is not read here."""

    def __init__(self, coding: str) -> None:
        super().__init__(f"Bodies may have `Content-Encoding: gzip` or `deflate`, or none. Given: {coding[:80]}")


class BodyTimeoutError(RequestError):
    """The body took too long to come."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request body must be here within {limit_s:g} s")


class BodyTooLargeError(RequestError):
    """The body is too large, decompressed."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body must be at most {limit_bytes} bytes, decompressed")


class ValidationError(RequestError):
    """A field is unknown, missing, or breaks a rule: the message names it, the limit and what was given.

    ``field``: "" for the body as a whole.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"Input validation error: {message}")
        self.field = field


class ChatTemplateError(RequestError):
    """The model's chat template makes no prompt of the messages.

    TGI's words, but for what it says of a model without one.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"Template error: {reason}")


class ToolError(RequestError):
    """Not the tools that may be asked for."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Tool error: {reason}")


class MissingKeyError(RequestError):
    """No API key where one is needed."""

    def __init__(self) -> None:
        super().__init__("An API key is needed here: send it as `Authorization: Bearer KEY`")


class InvalidKeyError(RequestError):
    """Not one of the API keys."""

    def __init__(self) -> None:
        super().__init__("Incorrect API key provided")


class RateLimitedError(RequestError):
    """More requests than its API key may make in this time."""

    def __init__(self, limit_per_minute: int, wait_s: float) -> None:
        self.retry_after_s = math.ceil(wait_s)
        super().__init__(
            f"This API key may make {limit_per_minute} requests per minute. Try again in {self.retry_after_s} s"
        )


class KeyConcurrencyError(RequestError):
    """As many generations as its API key may have are under way."""

    def __init__(self, limit: int, given: int) -> None:
        super().__init__(
            f"This API key may have {limit} generations under way. Asked for beside those that are: {given}"
        )


class OverloadedError(RequestError):
    """As many generations as the house has room for are under way."""

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class NotFoundError(RequestError):
    """No such route."""

    def __init__(self, path: str) -> None:
        super().__init__(f"Not found: {path[:200]}")


class MethodNotAllowedError(RequestError):
    """Not with this method."""

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"Method {method} is not allowed here. Allowed: {allowed}")
        self.allowed = allowed


class ExpectationError(RequestError):
    """``Expect`` asks for something else than to continue."""

    def __init__(self, given: str) -> None:
        super().__init__(f"`Expect` may be `100-continue`. Given: {given[:80]}")


class TooManyConnectionsError(RequestError):
    """As many connections as may be are open."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"Too many connections: {limit} may be open")


class UnhealthyError(RequestError):
    """No shard is up and makes progress, says ``/health``."""

    def __init__(self) -> None:
        super().__init__("unhealthy")


@dataclass(frozen=True, slots=True)
class Rendering:
    """``error_type``: TGI's word. ``openai_type``: OpenAI's coarser ``type``.

    ``openai_code``: OpenAI's ``code`` where it has a word of its own, else it is TGI's.
    """

    status: int
    error_type: str
    openai_status: int
    openai_type: str
    failure: Failure | None = None
    retry_after_s: int | None = None
    openai_code: str | None = None


_SERVER = "server_error"
_CLIENT = "invalid_request_error"
_RATE = "rate_limit_error"
_NO_ENTRY = Rendering(401, "invalid_api_key", 401, _CLIENT)
_TOO_MUCH = Rendering(429, "overloaded", 429, _RATE, Failure.RATE_LIMITED, RETRY_AFTER_S, "rate_limit_exceeded")

# Looked up along the class's bases: the most specific entry counts.
TABLE: dict[type[Exception], Rendering] = {
    MalformedRequestError: Rendering(400, "validation", 400, _CLIENT),
    MalformedBodyError: Rendering(400, "validation", 400, _CLIENT),
    UnsupportedMediaError: Rendering(415, "validation", 415, _CLIENT),
    UnsupportedCodingError: Rendering(415, "validation", 415, _CLIENT),
    BodyTimeoutError: Rendering(408, "request_timeout", 408, _CLIENT),
    BodyTooLargeError: Rendering(413, "validation", 413, _CLIENT),
    ValidationError: Rendering(422, "validation", 400, _CLIENT, Failure.VALIDATION),
    ChatTemplateError: Rendering(422, "template_error", 400, _CLIENT, Failure.TEMPLATE),
    ToolError: Rendering(422, "tool_error", 400, _CLIENT, Failure.VALIDATION),
    TextTooLongError: Rendering(422, "validation", 400, _CLIENT, Failure.VALIDATION),
    MissingKeyError: _NO_ENTRY,
    InvalidKeyError: _NO_ENTRY,
    RateLimitedError: _TOO_MUCH,
    KeyConcurrencyError: _TOO_MUCH,
    OverloadedError: Rendering(429, "overloaded", 429, _RATE, Failure.OVERLOADED, RETRY_AFTER_S),
    QueueTimeoutError: Rendering(429, "overloaded", 429, _RATE, Failure.QUEUE_TIMEOUT, RETRY_AFTER_S),
    DeadlineError: Rendering(504, "deadline_exceeded", 504, _SERVER, Failure.DEADLINE),
    NotFoundError: Rendering(404, "not_found", 404, _CLIENT),
    MethodNotAllowedError: Rendering(405, "method_not_allowed", 405, _CLIENT),
    ExpectationError: Rendering(417, "validation", 417, _CLIENT),
    TooManyConnectionsError: Rendering(503, "overloaded", 503, _SERVER, None, RETRY_AFTER_S),
    UnhealthyError: Rendering(503, "healthcheck", 503, _SERVER),
    NoShardError: Rendering(503, "no_shard", 503, _SERVER, Failure.GENERATION, RETRY_AFTER_S),
    IncompleteGenerationError: Rendering(500, "incomplete_generation", 500, _SERVER, Failure.INCOMPLETE),
    GenerationError: Rendering(424, "generation", 424, _SERVER, Failure.GENERATION),
}
INTERNAL = Rendering(500, "internal", 500, _SERVER)


def rendering_of(error: Exception) -> Rendering:
    """The entry of the table; INTERNAL for what is not in it."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def _message(error: Exception) -> str:
    match error:
        case RequestError():
            return str(error)
        case TextTooLongError():
            return f"Input validation error: {error}"
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
            # What broke is for the log: it may name paths and hosts.
            return "Internal server error"


def tgi_body(error: Exception) -> bytes:
    """TGI's envelope."""
    return msgspec.json.encode(ErrorBody(_message(error), rendering_of(error).error_type))


def openai_body(error: Exception) -> bytes:
    """OpenAI's envelope."""
    rendering = rendering_of(error)
    param = (error.field or None) if isinstance(error, ValidationError) else None
    code = rendering.openai_code or rendering.error_type
    return msgspec.json.encode(OpenAIErrorBody(OpenAIError(_message(error), rendering.openai_type, param, code)))


def is_openai_path(path: str) -> bool:
    return path.startswith("/v1/")


def is_ollama_path(path: str) -> bool:
    """Its errors are like TGI's in form and like OpenAI's in status."""
    return path.startswith("/api/")


def error_response(error: Exception, path: str) -> web.Response:
    """The error as a JSON response in the dialect of ``path``."""
    rendering = rendering_of(error)
    openai = is_openai_path(path)
    response = web.Response(
        status=rendering.openai_status if openai or is_ollama_path(path) else rendering.status,
        body=openai_body(error) if openai else tgi_body(error),
        content_type="application/json",
    )
    if rendering.retry_after_s is not None:
        response.headers["Retry-After"] = str(rendering.retry_after_s)
    match error:
        case RateLimitedError():
            response.headers["Retry-After"] = str(error.retry_after_s)
        case MissingKeyError():
            response.headers["WWW-Authenticate"] = "Bearer"
        case InvalidKeyError():
            response.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
        case MethodNotAllowedError():
            response.headers["Allow"] = error.allowed
        case MalformedRequestError() | BodyTimeoutError():
            # What comes next on this connection is not the beginning of a request.
            response.force_close()
        case _:
            pass
    return response
