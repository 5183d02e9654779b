"""The refusals of a shard. Each has a stable code, with which the gRPC status message starts.

In ``NOT_FOUND: UNKNOWN_SEQUENCE: sequence 7 is not held here``, the status is followed by the code and a sentence for
people. Clients decide by the code alone.
"""

from enum import Enum

import grpc


class ShardError(Enum):
    """Stable codes, each with its gRPC status. A refused command changed nothing."""

    BAD_REQUEST = ("BAD_REQUEST", grpc.StatusCode.INVALID_ARGUMENT)
    UNKNOWN_SEQUENCE = ("UNKNOWN_SEQUENCE", grpc.StatusCode.NOT_FOUND)
    SEQUENCE_EXISTS = ("SEQUENCE_EXISTS", grpc.StatusCode.ALREADY_EXISTS)
    WRONG_POSITION = ("WRONG_POSITION", grpc.StatusCode.FAILED_PRECONDITION)
    NOT_PREFILLED = ("NOT_PREFILLED", grpc.StatusCode.FAILED_PRECONDITION)
    TOO_MANY_TOKENS = ("TOO_MANY_TOKENS", grpc.StatusCode.OUT_OF_RANGE)
    SEQUENCE_TOO_LONG = ("SEQUENCE_TOO_LONG", grpc.StatusCode.OUT_OF_RANGE)
    TEXT_TOO_LONG = ("TEXT_TOO_LONG", grpc.StatusCode.OUT_OF_RANGE)
    MEDIA_TOO_LARGE = ("MEDIA_TOO_LARGE", grpc.StatusCode.OUT_OF_RANGE)
    STALE_EPOCH = ("STALE_EPOCH", grpc.StatusCode.FAILED_PRECONDITION)
    HELD = ("HELD", grpc.StatusCode.FAILED_PRECONDITION)
    NOT_LEASED = ("NOT_LEASED", grpc.StatusCode.FAILED_PRECONDITION)
    UNKNOWN_RUN = ("UNKNOWN_RUN", grpc.StatusCode.NOT_FOUND)
    ADAPTER_IN_USE = ("ADAPTER_IN_USE", grpc.StatusCode.FAILED_PRECONDITION)
    DRAINING = ("DRAINING", grpc.StatusCode.UNAVAILABLE)
    CHECK_FAILED = ("CHECK_FAILED", grpc.StatusCode.UNAVAILABLE)
    FORWARD_FAILED = ("FORWARD_FAILED", grpc.StatusCode.INTERNAL)

    def __init__(self, code: str, status: grpc.StatusCode) -> None:
        self.code = code
        self.status = status


# gRPC refuses metadata above 8 KiB, where bytes beyond ASCII take three each. A sentence may quote what it was given.
_LONGEST_SENTENCE = 600

_BY_CODE = {error.code: error for error in ShardError}


def format_error(error: ShardError, sentence: str) -> str:
    """Return the status message for ``error``. Of a sentence that is too long for it, the end is left out."""
    if len(sentence) > _LONGEST_SENTENCE:
        sentence = f"{sentence[:_LONGEST_SENTENCE]}..."
    return f"{error.code}: {sentence}"


def parse_error(message: str | None) -> tuple[ShardError | None, str]:
    """Split a status message into code and sentence. There is no code in the message of a transport error."""
    code, separator, sentence = (message or "").partition(": ")
    error = _BY_CODE.get(code) if separator else None
    return (error, sentence) if error is not None else (None, message or "")
