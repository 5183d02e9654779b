"""What is counted and measured of requests. `caravan_router.metrics` implements the interface."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from caravan_proto.messages.results import FinishReason


class Failure(Enum):
    """Why a request failed. The values are those of the label ``err``."""

    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limited"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    VALIDATION = "validation"
    TEMPLATE = "template"
    INCOMPLETE = "incomplete"
    DROPPED = "dropped"
    ABORTED = "aborted"
    GENERATION = "generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """Durations of a request that succeeded, in seconds.

    ``prefill_s``: from its first step to its first token; ``decode_s``: from there to its last.
    """

    total_s: float
    validation_s: float
    queue_s: float
    prefill_s: float
    decode_s: float

    @property
    def inference_s(self) -> float:
        """Seconds from its first step to its last token."""
        return self.prefill_s + self.decode_s


class RequestMetrics(Protocol):
    """The metrics of a model's requests. The methods are called on the event loop and must not block."""

    def request_validated(self, input_tokens: int, max_new_tokens: int) -> None: ...

    def request_failed(self, failure: Failure, generations: int = 1) -> None: ...

    def request_succeeded(self, timings: RequestTimings, generated_tokens: int, finish: FinishReason) -> None: ...

    def observe_first_token(self, since_arrival_s: float) -> None: ...

    def observe_inter_token(self, gap_s: float) -> None: ...

    def media_decoded(self, kind: str, duration_s: float) -> None:
        """A file of a picture or a sound became a medium."""

    def media_refused(self, reason: str) -> None:
        """A file of a picture or a sound was refused."""
