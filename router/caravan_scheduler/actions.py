"""What the scheduler decides: a closed union of actions, which the shell executes in order."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from caravan_proto.messages.commands import Command
from caravan_proto.messages.results import DraftCount
from caravan_scheduler.config import JoinReason
from caravan_scheduler.core.media import Media
from caravan_scheduler.core.prefixes import PinRefusal, ShardPrefixes
from caravan_scheduler.core.recomputed import NOTHING_RECOMPUTED, Recomputed
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Joins:
    """The next command of a shard lets requests start beside others that run."""

    reason: JoinReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Copy saved runs of the shard ``source`` into the memory of ``target``, beside the commands of both."""

    transfer_id: int
    source: str
    target: str
    keys: tuple[bytes, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Let a shard encode ``media``, beside its commands. It encodes one medium after another."""

    encode_id: int
    shard: str
    media: Media


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of a shard that drains is needed any more: it may end."""

    shard: str


@dataclass(frozen=True, slots=True)
class Start:
    """The first chunk of a request is sent to ``shard``; the ``cached_tokens`` before it need not be computed.

    ``recomputed``: why the others are.
    """

    request_id: int
    shard: str
    prompt_tokens: int
    cached_tokens: int
    recomputed: Recomputed = NOTHING_RECOMPUTED


@dataclass(frozen=True, slots=True)
class Resume:
    """A request that had lost its cells starts its next stay, on ``shard``.

    ``computed_again`` of its tokens had been computed before.
    """

    request_id: int
    shard: str
    computed_again: int


class Deliver(NamedTuple):
    """Hand a request the next logprobs of its prompt, then its next tokens. A token with ``finish`` is the last.

    The logprobs of a prompt are complete before the first token. A named tuple, since one is made for each token.
    """

    request_id: int
    prompt_logprobs: tuple[PromptToken, ...]
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class Drafted:
    """A step verified draft tokens of a request, whose tokens follow."""

    request_id: int
    count: DraftCount


class FailureReason(Enum):
    """Why a request could not be served; the values are metric labels."""

    NO_SHARD = "no_shard"
    NO_PROGRESS = "no_progress"
    DOES_NOT_FIT = "does_not_fit"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"
    MEDIA = "media"
    # The model computed NaN or infinite logits for it.
    NO_LOGITS = "no_logits"
    # The scheduler has a bug that this request has met.
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Fail:
    """A request ends without a finish reason."""

    request_id: int
    reason: FailureReason


class Preemption(Enum):
    """How a request lost its cells; the values are metric labels."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request gave its cells to others and waits for its next stay."""

    request_id: int
    how: Preemption


@dataclass(frozen=True, slots=True)
class Left:
    """All requests, by arrival, after `Replaced`: this scheduler knows them no longer."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Flushed:
    """What was evicted for the `FlushRequested` of this id; shards that are not leased are left out."""

    flush_id: int
    evicted: tuple[ShardPrefixes, ...]


@dataclass(frozen=True, slots=True)
class PinAnswered:
    """Why the prefix of the `PinRequested` of this id is not pinned; None if it is."""

    pin_id: int
    refusal: PinRefusal | None


@dataclass(frozen=True, slots=True)
class Faulted:
    """The scheduler has met a bug, and goes on without ``request_ids``, which fail.

    ``is_rebuilt``: it has begun anew, without a shard; the shards are to be lost, and to join again. Else nothing of
    other requests has changed.
    """

    error: Exception
    request_ids: tuple[int, ...]
    is_rebuilt: bool


Action = (
    Command
    | Joins
    | Fetch
    | Encode
    | Drained
    | Start
    | Resume
    | Drafted
    | Deliver
    | Fail
    | Preempt
    | Left
    | Flushed
    | PinAnswered
    | Faulted
)
