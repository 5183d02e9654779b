"""What the scheduler decides: a closed union of actions, which the shell executes in order."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from caravan_router.core.generation import GenerationSpec
from caravan_router.core.prefixes import ShardPrefixes
from caravan_router.core.speculation import DraftCount
from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.scheduling.config import JoinReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a shard does before the command itself: release, then park, then drop, then spill.

    ``release``: sequence ids to free. ``park``: ids of sequences that ended, each with the number of tokens to keep.
    ``drop_runs`` and ``spill_runs``: keys of saved runs to forget, and of saved runs to move from memory to disk.
    """

    release: tuple[int, ...] = ()
    park: tuple[tuple[int, int], ...] = ()
    drop_runs: tuple[bytes, ...] = ()
    spill_runs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """Start from the first ``length`` tokens of a sequence; if it has the same id, in place of it."""

    source_id: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of known tokens to compute, from position ``start`` on.

    ``setup`` is set on the first chunk of a sequence's stay, ``last`` on the chunk after which a token is sampled.
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
    """Run one step: chunks of prompts, and one decode token for each sequence of ``ride``."""

    shard: str
    command_id: int
    header: Header
    chunks: tuple[Chunk, ...]
    ride: tuple[int, ...]
    # Why requests start beside others that run; None if none do.
    joins: JoinReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """Run up to ``max_steps`` steps, fewer if the next command comes. No sequence gets more than ``max_steps`` tokens.

    A step may verify up to ``max_draft_tokens`` draft tokens, of all sequences together.
    """

    shard: str
    command_id: int
    header: Header
    sequence_ids: tuple[int, ...]
    max_steps: int
    max_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Known tokens of a beam to compute, from position ``start`` on.

    ``is_first``: the shard does not hold the sequence yet. ``top_n_tokens``: how many of the likeliest next tokens are
    returned; 0 unless all that is known is computed with the row.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    adapter: str
    is_first: bool
    top_n_tokens: int = 0
    copy: PrefixCopy | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Run one step over rows. Nothing is sampled; a sequence stays held as it is."""

    shard: str
    command_id: int
    header: Header
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBatch:
    """Keep these sequences and release all others."""

    shard: str
    command_id: int
    header: Header
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEntry:
    """Save the cells of a sequence from position ``start`` on, up to the last of ``cuts``: positions and their keys.

    ``release``: free its id and cells afterwards, saved or not.
    """

    sequence_id: int
    start: int
    cuts: tuple[tuple[int, bytes], ...]
    release: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Copy cells of sequences out of the cache, as runs that outlive them."""

    shard: str
    command_id: int
    header: Header
    entries: tuple[SaveEntry, ...]


@dataclass(frozen=True, slots=True)
class RunSlice:
    """The cells [start, end) of the saved run with this key."""

    key: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadEntry:
    """Make an ended sequence that holds ``token_ids``, whose cells the slices provide without gaps."""

    sequence_id: int
    token_ids: tuple[int, ...]
    slices: tuple[RunSlice, ...]
    adapter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Copy saved runs into the cache, for sequences to start from. The runs stay."""

    shard: str
    command_id: int
    header: Header
    entries: tuple[LoadEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLayout:
    """Make the KV cache anew in the other layout, with all sequences in it."""

    shard: str
    command_id: int
    header: Header
    shares_cells: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Copy saved runs of the shard ``source`` into the memory of ``target``, beside the commands of both."""

    transfer_id: int
    source: str
    target: str
    keys: tuple[bytes, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Nothing of a shard that drains is needed any more: it may end."""

    shard: str


@dataclass(frozen=True, slots=True)
class Start:
    """The first chunk of a request is sent to ``shard``; the ``cached_tokens`` before it need not be computed."""

    request_id: int
    shard: str
    prompt_tokens: int
    cached_tokens: int


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
class Flushed:
    """What was evicted for the `FlushRequested` of this id; shards that are not leased are left out."""

    flush_id: int
    evicted: tuple[ShardPrefixes, ...]


Command = Prefill | Decode | Evaluate | FilterBatch | Save | Load | SetLayout
Action = Command | Fetch | Drained | Start | Resume | Drafted | Deliver | Fail | Preempt | Flushed
