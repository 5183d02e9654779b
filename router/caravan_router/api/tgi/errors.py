"""TGI's error envelope: ``{"error": MESSAGE, "error_type": WORD}``."""

import msgspec

from caravan_router.api.dialect import Dialect
from caravan_router.api.errors import ErrorKind, kind_of, message_of


class ErrorBody(msgspec.Struct, frozen=True):
    """TGI's envelope. ``error_type`` is a stable word, ``error`` a sentence for people."""

    error: str
    error_type: str


def _status(kind: ErrorKind) -> int:
    return kind.status


def _body(error: Exception, _request_id: str) -> bytes:
    return msgspec.json.encode(ErrorBody(message_of(error), kind_of(error).error_type))


TGI = Dialect(name="TGI", envelope=ErrorBody, status=_status, body=_body)
