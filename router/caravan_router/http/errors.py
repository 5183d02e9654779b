"""Errors a client sees, and the one table of what each becomes on TGI's routes and on OpenAI's."""

from dataclasses import dataclass

import msgspec
from aiohttp import web

from caravan_router.engine.interface import GenerationError, NoShardError, TextTooLongError
from caravan_router.http.schema_errors import ErrorBody, OpenAIError, OpenAIErrorBody
from caravan_router.metrics import Failure
from caravan_router.text.generation import IncompleteGenerationError

RETRY_AFTER_S = 1


class RequestError(Exception):
    """The request cannot be served as it is.

    RequestError
     +-- MalformedBodyError     not JSON (400)
     +-- UnsupportedMediaError  a content type that is not JSON (415)
     +-- BodyTooLargeError      (413)
     +-- ValidationError        JSON, but not what may be asked; see validation_errors.py (422, on /v1 400)
     +-- OverloadedError        as many generations as allowed are under way (429)
     +-- NotFoundError          no such route (404)
     +-- MethodNotAllowedError  (405)
     +-- UnhealthyError         GET /health (503)
    """


class MalformedBodyError(RequestError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"The request body is not valid JSON: {reason}")


class UnsupportedMediaError(RequestError):
    def __init__(self, content_type: str) -> None:
        super().__init__(f"Expected a request with `Content-Type: application/json`. Given: {content_type}")


class BodyTooLargeError(RequestError):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body must be at most {limit_bytes} bytes, decompressed")


class ValidationError(RequestError):
    """``field`` is the offending field, "" for the body as a whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"Input validation error: {message}")
        self.field = field


class OverloadedError(RequestError):
    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class NotFoundError(RequestError):
    def __init__(self, path: str) -> None:
        super().__init__(f"Not found: {path[:200]}")


class MethodNotAllowedError(RequestError):
    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"Method {method} is not allowed here. Allowed: {allowed}")
        self.allowed = allowed


class UnhealthyError(RequestError):
    def __init__(self) -> None:
        super().__init__("unhealthy")


@dataclass(frozen=True, slots=True)
class Rendering:
    """``error_type``: TGI's word, OpenAI's ``code``. ``openai_type``: OpenAI's coarser ``type``."""

    status: int
    error_type: str
    openai_status: int
    openai_type: str
    failure: Failure | None = None
    retry_after_s: int | None = None


_SERVER = "server_error"
_CLIENT = "invalid_request_error"

# Looked up along the class's bases: the most specific entry counts.
TABLE: dict[type[Exception], Rendering] = {
    MalformedBodyError: Rendering(400, "validation", 400, _CLIENT),
    UnsupportedMediaError: Rendering(415, "validation", 415, _CLIENT),
    BodyTooLargeError: Rendering(413, "validation", 413, _CLIENT),
    ValidationError: Rendering(422, "validation", 400, _CLIENT, Failure.VALIDATION),
    TextTooLongError: Rendering(422, "validation", 400, _CLIENT, Failure.VALIDATION),
    OverloadedError: Rendering(429, "overloaded", 429, "rate_limit_error", Failure.OVERLOADED, RETRY_AFTER_S),
    NotFoundError: Rendering(404, "not_found", 404, _CLIENT),
    MethodNotAllowedError: Rendering(405, "method_not_allowed", 405, _CLIENT),
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
    return msgspec.json.encode(
        OpenAIErrorBody(OpenAIError(_message(error), rendering.openai_type, param, rendering.error_type))
    )


def is_openai_path(path: str) -> bool:
    return path.startswith("/v1/")


def error_response(error: Exception, path: str) -> web.Response:
    """The error as a JSON response in the dialect of ``path``."""
    rendering = rendering_of(error)
    openai = is_openai_path(path)
    response = web.Response(
        status=rendering.openai_status if openai else rendering.status,
        body=openai_body(error) if openai else tgi_body(error),
        content_type="application/json",
    )
    if rendering.retry_after_s is not None:
        response.headers["Retry-After"] = str(rendering.retry_after_s)
    if isinstance(error, MethodNotAllowedError):
        response.headers["Allow"] = error.allowed
    return response
