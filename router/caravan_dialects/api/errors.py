"""Errors a client sees, and what each becomes on the wire."""

import math
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import ClassVar

from caravan_scheduler.core.request_metrics import Failure

RETRY_AFTER_S = 1


class ErrorFamily(Enum):
    """The party that caused an error. OpenAI's coarse error types derive from it."""

    CLIENT = "client"
    RATE = "rate"
    SERVER = "server"


# Two entries of TABLE are two kinds, even if all of their fields are equal.
@dataclass(frozen=True, slots=True, eq=False)
class ErrorKind:
    """The form of an error on the wire.

    ``status`` and ``error_type`` are TGI's; other dialects derive theirs. ``failure``: label of the failure metric;
    None for errors that are not counted. ``meaning`` explains the error in the documentation; "" if the first line of
    its docstring does.
    """

    status: int
    error_type: str
    family: ErrorFamily
    failure: Failure | None = None
    retry_after_s: int | None = None
    meaning: str = ""


_CLIENT, _RATE, _SERVER = ErrorFamily.CLIENT, ErrorFamily.RATE, ErrorFamily.SERVER


class RequestError(Exception):
    """The request cannot be served. ``kind`` says what it becomes on the wire, ``sentence`` what all clients read."""

    kind: ClassVar[ErrorKind]
    sentence: ClassVar[str] = ""

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.sentence)


class MalformedRequestError(RequestError):
    """The request is not valid HTTP/1.1."""

    kind = ErrorKind(400, "validation", _CLIENT)

    def __init__(self, reason: str) -> None:
        # aiohttp's parser quotes the bytes it could not read, over several lines.
        super().__init__(f"The request is not valid HTTP/1.1: {reason.partition(chr(10))[0][:200].rstrip(': ')}")


class MalformedBodyError(RequestError):
    """The body is not valid JSON."""

    kind = ErrorKind(400, "validation", _CLIENT)

    def __init__(self, reason: str) -> None:
        super().__init__(f"The request body is not valid JSON: {reason}")


class BrokenBodyError(RequestError):
    """The body cannot be decompressed, or ends early."""

    kind = ErrorKind(400, "validation", _CLIENT)
    sentence = "The request body could not be decompressed or ended early"


class MalformedFormError(RequestError):
    """The body is not a valid form."""

    kind = ErrorKind(400, "validation", _CLIENT)

    def __init__(self, reason: str) -> None:
        super().__init__(f"The request body is not a valid form: {reason}")


class UnsupportedMediaError(RequestError):
    """The content type is neither JSON nor that of a form."""

    kind = ErrorKind(415, "validation", _CLIENT)

    def __init__(self, content_type: str, expected: str = "application/json") -> None:
        super().__init__(f"Expected a request with `Content-Type: {expected}`. Given: {content_type[:80]}")


class UnsupportedCodingError(RequestError):
    """The content coding is neither gzip nor deflate."""

    kind = ErrorKind(415, "validation", _CLIENT)

    def __init__(self, coding: str) -> None:
        super().__init__(f"`Content-Encoding` must be `gzip` or `deflate`, or left out. Given: {coding[:80]}")


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    kind = ErrorKind(408, "request_timeout", _CLIENT)

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"The request body did not arrive within {limit_s:g} s")


class BodyTooLargeError(RequestError):
    """The decompressed body is too large."""

    kind = ErrorKind(413, "validation", _CLIENT)

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body must have at most {limit_bytes} bytes after decompression")


class DecodedBodyTooLargeError(RequestError):
    """The body's values take more memory than one client may have."""

    kind = ErrorKind(413, "validation", _CLIENT)

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The request body and its values may take at most {limit_bytes} bytes of memory. Needed: {needed_bytes}"
        )


class BodiesTooLargeError(RequestError):
    """The bodies of all open requests together take too much memory, or those of this client take too much of it."""

    kind = ErrorKind(503, "overloaded", _SERVER, None, RETRY_AFTER_S)

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            "The bodies of the open requests take too much memory. "
            f"Allowed: {limit_bytes} bytes together, of which one client may have as much as it leaves free"
        )


class ValidationError(RequestError):
    """A field is unknown, missing, or breaks a rule. The message names the field, the limit and the value given.

    ``field`` is "" when the error concerns the whole body.
    """

    kind = ErrorKind(422, "validation", _CLIENT, Failure.VALIDATION)

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"Input validation error: {message}")
        self.field = field


class ContextLengthError(ValidationError):
    """The prompt, or the prompt and its output, does not fit the model's context.

    Agents find this error by the code and the words of their dialect, and then shorten what they send.
    """

    kind = ErrorKind(422, "validation", _CLIENT, Failure.VALIDATION)


class BodyMismatchError(ValidationError):
    """A field that is unknown, missing or of the wrong type."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)


class ChatTemplateError(RequestError):
    """The model's chat template cannot render the messages.

    The prefix is TGI's.
    """

    kind = ErrorKind(422, "template_error", _CLIENT, Failure.TEMPLATE)

    def __init__(self, reason: str) -> None:
        super().__init__(f"Template error: {reason}")


class ToolError(RequestError):
    """The tools cannot be used as requested.

    ``field``: the one that is wrong; empty if it is not a single one.
    """

    kind = ErrorKind(422, "tool_error", _CLIENT, Failure.VALIDATION)

    def __init__(self, reason: str, field: str = "") -> None:
        super().__init__(f"Tool error: {reason}")
        self.field = field


class MissingKeyError(RequestError):
    """The route needs an API key and none was sent."""

    kind = ErrorKind(401, "invalid_api_key", _CLIENT)
    sentence = "An API key is needed here: send it as `Authorization: Bearer KEY`"


class InvalidKeyError(RequestError):
    """The API key is unknown."""

    kind = ErrorKind(401, "invalid_api_key", _CLIENT)
    sentence = "Incorrect API key provided"


class ForbiddenError(RequestError):
    """The route is for operators, and the API key is not an operator's."""

    kind = ErrorKind(403, "forbidden", _CLIENT)
    sentence = "This route needs the API key of an operator: one with `operator = true` in the file of keys"


class NotLocalError(RequestError):
    """The route is for operators, there are no API keys, and the request comes from another host."""

    kind = ErrorKind(403, "forbidden", _CLIENT)
    sentence = (
        "This router has no API keys. Therefore this route answers programs and this router's page on the router's "
        "host only, and neither proxies nor other pages. For others, start the router with --api-keys-file and "
        "send the key of an operator"
    )


class ForeignPageError(RequestError):
    """The request comes from a web page whose origin is not allowed."""

    kind = ErrorKind(403, "forbidden", _CLIENT)

    def __init__(self, origin: str) -> None:
        super().__init__(f"Pages of this origin may not use the API. Given: {origin[:200]}")


class RateLimitedError(RequestError):
    """The API key made too many requests per minute."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.RATE_LIMITED, RETRY_AFTER_S)

    def __init__(self, limit_per_minute: int, wait_s: float) -> None:
        self.retry_after_s = math.ceil(wait_s)
        super().__init__(
            f"This API key may make {limit_per_minute} requests per minute. Try again in {self.retry_after_s} s"
        )


class BudgetError(RequestError):
    """The API key has used its tokens of this day or month."""

    kind = ErrorKind(429, "insufficient_quota", _RATE, Failure.RATE_LIMITED)

    def __init__(self, limit: int, used: int, period: str, ends: datetime, now_s: float) -> None:
        self.retry_after_s = max(1, math.ceil(ends.timestamp() - now_s))
        super().__init__(
            # OpenAI's words, which clients look for.
            f"You exceeded your current quota: this API key may use {limit} tokens per {period} and has used {used}. "
            f"Requests are accepted again from {ends:%Y-%m-%dT%H:%M:%SZ} on"
        )


class UsageUnreadableError(RequestError):
    """What API keys have used cannot be read, for example because the disk is full."""

    kind = ErrorKind(503, "store_unavailable", _SERVER, None, RETRY_AFTER_S)
    sentence = "The usage of API keys cannot be read now"


class KeyConcurrencyError(RequestError):
    """The API key has too many generations running."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.RATE_LIMITED, RETRY_AFTER_S)

    def __init__(self, limit: int, given: int) -> None:
        super().__init__(
            f"This API key may run {limit} generations at a time. This request needs {given}, and fewer are free"
        )


class BackgroundLimitError(RequestError):
    """The API key has too many responses in the background."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.RATE_LIMITED, RETRY_AFTER_S)

    def __init__(self, limit: int) -> None:
        super().__init__(f"This API key may have {limit} responses in the background at a time, and has as many")


class FileRoomError(RequestError):
    """The files of this API key, or of all of them, would take too much room."""

    kind = ErrorKind(413, "validation", _CLIENT)

    def __init__(self, room_bytes: int) -> None:
        super().__init__(
            f"There is room for {room_bytes} more bytes in files of this API key (--file-space). Delete some, or wait "
            "until they expire"
        )


class BatchEndedError(RequestError):
    """A batch that has ended cannot be cancelled, and one that has not cannot be deleted."""

    kind = ErrorKind(400, "validation", _CLIENT)

    def __init__(self, done: str, status: str) -> None:
        super().__init__(f"This batch cannot be {done}. Its status: {status}")


class EndingError(RequestError):
    """The server ends, and another one continues what it generates in the background."""

    kind = ErrorKind(503, "unavailable", _SERVER, Failure.OVERLOADED, RETRY_AFTER_S)
    sentence = "The server is ending. Try again"


class OverloadedError(RequestError):
    """The model has too many generations running."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.OVERLOADED, RETRY_AFTER_S)
    sentence = "Model is overloaded"


class TooManyViewersError(RequestError):
    """Too many clients watch the timeline."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.OVERLOADED, RETRY_AFTER_S)
    sentence = "Too many clients watch the timeline"


class NotFoundError(RequestError):
    """There is no such route."""

    kind = ErrorKind(404, "not_found", _CLIENT)

    def __init__(self, path: str) -> None:
        super().__init__(f"Not found: {path[:200]}")


class MethodNotAllowedError(RequestError):
    """The route does not take this method."""

    kind = ErrorKind(405, "method_not_allowed", _CLIENT)

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"Method {method} is not allowed here. Allowed: {allowed}")
        self.allowed = allowed


class ExpectationError(RequestError):
    """`Expect` is not `100-continue`."""

    kind = ErrorKind(417, "validation", _CLIENT)

    def __init__(self, given: str) -> None:
        super().__init__(f"`Expect` must be `100-continue`, or left out. Given: {given[:80]}")


class TooManyConnectionsError(RequestError):
    """Too many connections are open."""

    kind = ErrorKind(503, "overloaded", _SERVER, None, RETRY_AFTER_S)

    def __init__(self, limit: int) -> None:
        super().__init__(f"Too many connections are open. Allowed: {limit}")


class AbortedError(RequestError):
    """The request was aborted by `DELETE /v1/requests/{id}`."""

    # Many clients retry a 409.
    kind = ErrorKind(410, "aborted", _CLIENT, Failure.ABORTED)
    sentence = "The request was aborted by `DELETE /v1/requests/{id}`"


class UnknownRequestError(RequestError):
    """The API key has no request of this id in progress."""

    kind = ErrorKind(404, "not_found", _CLIENT)

    def __init__(self, request_id: str) -> None:
        super().__init__(f"This API key has no request in progress with this id. Given: {request_id[:128]}")


class UnknownEntryError(RequestError):
    """The API key has no such response, conversation or item."""

    kind = ErrorKind(404, "not_found", _CLIENT)

    def __init__(self, kind: str, entry_id: str) -> None:
        super().__init__(f"There is no {kind} with this id. Given: {entry_id[:128]}")


class UnknownPreviousError(RequestError):
    """The API key has no response of the id in ``previous_response_id``, or no more."""

    kind = ErrorKind(404, "previous_response_not_found", _CLIENT)

    def __init__(self, entry_id: str) -> None:
        super().__init__(f"There is no response with the id in `previous_response_id`. Given: {entry_id[:128]}")


class UpgradeRequiredError(RequestError):
    """The route takes WebSocket connections only, or `--no-websockets` is set."""

    kind = ErrorKind(426, "upgrade_required", _CLIENT)


class ConnectionLimitError(RequestError):
    """The WebSocket connection has been open for as long as one may be."""

    kind = ErrorKind(400, "websocket_connection_limit_reached", _CLIENT)

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"A WebSocket connection ends after {limit_s:g} seconds. Connect again to go on")


class TooManyTurnsError(RequestError):
    """Too many requests wait on one WebSocket connection."""

    kind = ErrorKind(429, "overloaded", _RATE, Failure.OVERLOADED, RETRY_AFTER_S)

    def __init__(self, limit: int) -> None:
        super().__init__(f"At most {limit} requests may run or wait on one WebSocket connection")


class ResponseEndedError(RequestError):
    """A response that has ended cannot be cancelled."""

    kind = ErrorKind(400, "response_ended", _CLIENT)

    def __init__(self, status: str) -> None:
        # OpenAI's words come first: clients look for them.
        super().__init__(f"Cannot cancel a synchronous response. It has ended, and its status is {status}")


class NoEventsError(RequestError):
    """The response has no events: it was not generated in the background, or has ended long ago."""

    kind = ErrorKind(400, "no_events", _CLIENT)
    sentence = "Only responses with `background` can be streamed again, for some time after their end"


class NoCompactionError(RequestError):
    """OpenAI's route that compacts a conversation does not exist here."""

    kind = ErrorKind(404, "not_found", _CLIENT)
    sentence = (
        "/v1/responses/compact is not supported: let the client summarize the conversation, or send "
        '`"truncation": "auto"`, which leaves out the oldest turns that do not fit'
    )


class ConversationBusyError(RequestError):
    """A response or a change of the conversation is in progress."""

    kind = ErrorKind(409, "conversation_busy", _CLIENT, None, RETRY_AFTER_S)
    sentence = "This conversation is being answered or changed. Wait until that has ended, or fork the conversation"


class RepeatedRequestError(RequestError):
    """A request with the same `Idempotency-Key` is being begun."""

    kind = ErrorKind(409, "request_repeated", _CLIENT, None, RETRY_AFTER_S)
    sentence = "A request with this `Idempotency-Key` is being begun. Send it again in a moment"


class HeadMovedError(RequestError):
    """The conversation has changed since the expected `head`."""

    kind = ErrorKind(409, "head_moved", _CLIENT)
    sentence = "The head of the conversation has moved. Read the conversation, and repeat the change if it still fits"


class NotStoredError(RequestError):
    """A response was generated and could not be added to its conversation."""

    kind = ErrorKind(503, "not_stored", _SERVER, None, RETRY_AFTER_S)
    sentence = "The response was generated but could not be stored, so it is not in the conversation"


class NoSlotError(RequestError):
    """`/slots`: all slots are in use."""

    kind = ErrorKind(503, "overloaded", _SERVER, None, RETRY_AFTER_S)
    sentence = "As many generations are in progress as may be"


class NoCatalogueError(RequestError):
    """The server loads and unloads no models."""

    kind = ErrorKind(404, "not_found", _CLIENT)
    sentence = "This server's models are loaded at its start: it has no catalogue, see docs/models.md"


class CatalogueRefusalError(RequestError):
    """The model catalogue cannot do what an operator requested."""

    kind = ErrorKind(400, "library", _CLIENT)


class CatalogueFailedError(RequestError):
    """The disk of the model catalogue or the hub fails."""

    kind = ErrorKind(503, "library", _SERVER)


class UnknownShardError(RequestError):
    """No shard with this name is up."""

    kind = ErrorKind(404, "not_found", _CLIENT)

    def __init__(self, name: str) -> None:
        super().__init__(f"No shard with this name is up. Given: {name[:200]}")


class UnknownPrefixError(RequestError):
    """No shard that is up has a prefix with this id."""

    kind = ErrorKind(404, "not_found", _CLIENT)

    def __init__(self, prefix_id: str) -> None:
        super().__init__(f"No shard that is up has a prefix with this id. Given: {prefix_id[:200]}")


class UnknownModelError(RequestError):
    """No model or adapter of this name is served."""

    kind = ErrorKind(404, "model_not_found", _CLIENT, Failure.VALIDATION)

    def __init__(self, name: str) -> None:
        super().__init__(f"The model does not exist. GET /v1/models lists those that do. Given: {name[:200]}")
        self.field = "model"


class UnhealthyError(RequestError):
    """`/health`: no shard is up and makes progress. `/readyz`: none has been up yet."""

    kind = ErrorKind(503, "healthcheck", _SERVER)
    sentence = "unhealthy"
