"""TGI's error envelope: ``{"error": MESSAGE, "error_type": WORD}``."""

import msgspec

from caravan_dialects.api.error_table import Dialect, kind_of, message_of
from caravan_dialects.api.errors import ErrorKind
from caravan_dialects.api.generation.rules import PromptTooLongError


class ErrorBody(msgspec.Struct, frozen=True):
    """TGI's envelope. ``error_type`` is a stable word, ``error`` a sentence for people."""

    error: str
    error_type: str


def _status(kind: ErrorKind) -> int:
    return kind.status


def _body(error: Exception, _request_id: str) -> bytes:
    return msgspec.json.encode(ErrorBody(_message(error), kind_of(error).error_type))


def _message(error: Exception) -> str:
    """Return the sentence that clients see. They know TGI's for what does not fit the context."""
    match error:
        case PromptTooLongError(field="inputs", limit=limit, given=given, total=int(total)):
            both = f"`inputs` tokens + `max_new_tokens` must be <= {total}"
            return f"Input validation error: `inputs` must have at most {limit} tokens, and {both}. Given: {given}"
        case _:
            return message_of(error)


TGI = Dialect(name="TGI", envelope=ErrorBody, status=_status, body=_body)
