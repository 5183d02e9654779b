"""What the scheduler decides. Closed union: the shell executes each by name, in order."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from caravan_router.core.generation import GenerationSpec
from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.scheduling.config import JoinReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a shard does before the command itself.

    Release sequence ids, then park sequences (id and the tokens to keep), and forget swapped ones by handle.
    """

    release: tuple[int, ...] = ()
    park: tuple[tuple[int, int], ...] = ()
    drop_handles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Start with the first ``length`` tokens of a sequence; of one's own id: take over what is held there."""

    source_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of tokens to compute at ``start``. ``setup`` is set on a sequence's first chunk, ``last`` on its last.

    ``prompt_logprobs`` is set on the first chunk if the shard must return logprobs for this and the following chunks.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    last: bool
    setup: GenerationSpec | None
    copy: PrefixCopy | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One pass: chunks of prompts, and one decode token for each riding sequence."""

    shard: str
    command_id: int
    header: Header
    chunks: tuple[Chunk, ...]
    ride: tuple[int, ...]
    # Set when requests start beside others that run.
    joins: JoinReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Up to ``max_steps`` passes, cut short by the next command."""

    shard: str
    command_id: int
    header: Header
    sequence_ids: tuple[int, ...]
    max_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences, release all others."""

    shard: str
    command_id: int
    header: Header
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOutEntry:
    """Save tokens [start, ..) of a sequence under ``handle``."""

    sequence_id: int
    handle: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut:
    """Move sequences to the shard's swap space; their ids and cells are free afterwards, saved or not."""

    shard: str
    command_id: int
    header: Header
    entries: tuple[SwapOutEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapInEntry:
    """Bring a swapped sequence back under a free id; ``copy`` provides the tokens that were not saved."""

    handle: int
    sequence_id: int
    copy: PrefixCopy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """Bring swapped sequences back. Their handles are gone afterwards, restored or not."""

    shard: str
    command_id: int
    header: Header
    entries: tuple[SwapInEntry, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """The request's first chunk goes to a shard now; ``cached_tokens`` before it need not be computed."""

    request_id: int
    prompt_tokens: int
    cached_tokens: int


class Deliver(NamedTuple):
    """Hand a request the next logprobs of its prompt, then its next tokens. A token with ``finish`` is the last.

    The logprobs of a prompt are complete before the first token. A named tuple, since one is made for each token.
    """

    request_id: int
    prompt_logprobs: tuple[PromptToken, ...]
    tokens: tuple[GeneratedToken, ...]


class FailureReason(Enum):
    """Why a request could not be served; the values are stable and used in metrics."""

    NO_SHARD = "no_shard"
    NO_PROGRESS = "no_progress"
    DOES_NOT_FIT = "does_not_fit"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends without a finish."""

    request_id: int
    reason: FailureReason


class Preemption(Enum):
    """How a request lost its cells: the values are metric labels."""

    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Preempt:
    """A running request gave its cells to others and waits to go on."""

    request_id: int
    how: Preemption


Command = Prefill | Decode | FilterBatch | SwapOut | SwapIn
Action = Command | Start | Deliver | Fail | Preempt
