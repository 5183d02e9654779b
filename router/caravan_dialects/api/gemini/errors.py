"""Google's error envelope: ``{"error": {"code", "message", "status"}}``, OpenAI's statuses."""

import msgspec

from caravan_dialects.api.error_table import Dialect, kind_of, message_of
from caravan_dialects.api.errors import ErrorKind
from caravan_dialects.api.generation.rules import PromptTooLongError, PromptTooManyBytesError
from caravan_dialects.api.openai.errors import openai_status

# Google's names of statuses.
_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    410: "CANCELLED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class GeminiError(msgspec.Struct, frozen=True):
    """``code``: the HTTP status."""

    code: int
    message: str
    status: str


class GeminiErrorBody(msgspec.Struct, frozen=True):
    """Google's envelope."""

    error: GeminiError


def gemini_status(kind: ErrorKind) -> str:
    """Return Google's ``status``."""
    status = openai_status(kind)
    # What shards could not do is the server's fault, too.
    default = "INVALID_ARGUMENT" if status < 500 and status != 424 else "INTERNAL"
    return _NAMES.get(status, default)


def _message(error: Exception) -> str:
    """Return the sentence that clients see. Agents know Google's for what does not fit the context."""
    match error:
        case PromptTooLongError(limit=limit, given=given):
            return f"The input token count ({given}) exceeds the maximum number of tokens allowed ({limit})."
        case PromptTooManyBytesError(limit=limit, given=given):
            return (
                f"The input token count exceeds the maximum number of tokens allowed: it may have at most "
                f"{limit} bytes. Given: {given} bytes"
            )
        case _:
            return message_of(error)


def _body(error: Exception, _request_id: str) -> bytes:
    kind = kind_of(error)
    return msgspec.json.encode(GeminiErrorBody(GeminiError(openai_status(kind), _message(error), gemini_status(kind))))


GEMINI = Dialect(name="Gemini", envelope=GeminiErrorBody, status=openai_status, body=_body, key_parameter="key")
