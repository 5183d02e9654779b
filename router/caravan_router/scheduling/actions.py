"""What the scheduler decides. Closed union: the shell executes each by name, in order."""

from dataclasses import dataclass
from enum import Enum

from caravan_router.scheduling.policy import JoinReason
from caravan_router.scheduling.sequence import Request
from caravan_router.scheduling.tokens import GeneratedToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens to compute at ``start``. ``setup`` is set on a sequence's first chunk, ``last`` on its last."""

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    last: bool
    setup: Request | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One pass: chunks of prompts, and one decode token for each riding sequence."""

    shard: str
    command_id: int
    release: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    ride: tuple[int, ...]
    # Set when requests start beside others that run.
    joins: JoinReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Up to ``max_steps`` passes, cut short by the next command."""

    shard: str
    command_id: int
    release: tuple[int, ...]
    sequence_ids: tuple[int, ...]
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences, release all others."""

    shard: str
    command_id: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """The request's first chunk goes to a shard now; ``cached_tokens`` before it need not be computed."""

    request_id: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Emit:
    """New tokens, in order; one with ``finish`` is its request's last."""

    tokens: tuple[tuple[int, GeneratedToken], ...]


class FailureReason(Enum):
    """Why a request could not be served; the values are stable and used in metrics."""

    NO_SHARD = "no_shard"
    NO_PROGRESS = "no_progress"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends without a finish."""

    request_id: int
    reason: FailureReason


Command = Prefill | Decode | FilterBatch
Action = Command | Start | Emit | Fail
