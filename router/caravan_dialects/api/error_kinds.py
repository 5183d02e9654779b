"""The forms that errors have on the wire."""

from dataclasses import dataclass
from enum import Enum

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
