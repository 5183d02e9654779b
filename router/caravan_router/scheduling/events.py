"""What happens to the scheduler: a closed union of events."""

from dataclasses import dataclass
from enum import Enum

from caravan_router.core.speculation import DraftCount
from caravan_router.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_router.scheduling.sequence import Request


class Saving(Enum):
    """Which cells of a sequence can be saved."""

    # Any run of them, which can be cut anywhere.
    ANY = "any"
    # All of them, and they cannot be cut.
    WHOLE_ONLY = "whole_only"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutLimits:
    """What depends on the layout of a shard's KV cache.

    ``shares_cells``: sequences with a common prefix hold its cells once, and any sequence may use any cell (the unified
    layout); else each sequence has its own part of the cells, and copies of prefixes.
    ``whole_only``: a sequence can only be copied as it is, never cut back (recurrent memory).
    """

    cells: int
    cells_per_sequence: int
    shares_cells: bool = True
    whole_only: bool = False
    saving: Saving = Saving.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """What fits on a shard: sequences, tokens in one step, and what its layouts of the cache hold.

    ``layout`` is the current one, ``other_layout`` the one that the cache can change to, if any.
    ``memory_bytes`` and ``disk_bytes`` are there for saved runs.
    ``max_prompt_logprob_tokens``: prompt tokens of one step whose logprobs are returned, all sequences together.
    ``max_draft_tokens``: draft tokens of one step, all sequences together; 0 where sequences cannot be cut back.
    ``run_fingerprint``: shards that have the same can fetch saved runs from each other; empty if none can.
    """

    layout: LayoutLimits
    other_layout: LayoutLimits | None = None
    max_sequences: int
    max_batch_tokens: int
    memory_bytes: int = 0
    disk_bytes: int = 0
    max_prompt_logprob_tokens: int = 1
    max_draft_tokens: int = 0
    run_fingerprint: str = ""

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of one step in the current layout."""
        return 0 if self.layout.whole_only else self.max_draft_tokens

    @property
    def most_cells_per_sequence(self) -> int:
        """Most cells of a sequence in the layout that allows more."""
        other = self.other_layout.cells_per_sequence if self.other_layout is not None else 0
        return max(self.layout.cells_per_sequence, other)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """The cells [start, end) of a prefix that a shard keeps outside its cache.

    ``cuts``: the positions where the run can be cut, each with the key of the prefix that ends there. The last one is
    its end and names the run.
    """

    start: int
    cuts: tuple[tuple[int, bytes], ...]
    size_bytes: int
    on_disk: bool = False

    @property
    def key(self) -> bytes:
        return self.cuts[-1][1]


class StepOutcome(Enum):
    """How a step ended. Any outcome but OK changed nothing on the shard."""

    OK = "ok"
    NO_KV = "no_kv"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A new request waits for a shard."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody waits for this request any more. Ignored if it has ended, since cancelling races with ending."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ShardJoined:
    """A shard was leased. It holds no sequence, but maybe ``runs`` that were saved before, in order.

    ``survived``: it is the process that was lost before, and has gone on since: it was slow or cut off, not broken.
    """

    shard: str
    limits: ShardLimits
    runs: tuple[SavedRun, ...] = ()
    survived: bool = False


@dataclass(frozen=True, slots=True)
class ShardLost:
    """A shard is gone with all it held. Ignored if it never joined."""

    shard: str


@dataclass(frozen=True, slots=True)
class ShardDraining:
    """A shard is about to end: it takes no sequences, and those that it has move to other shards or end there."""

    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step has ended: the reply to a Prefill or an Evaluate, or one of the replies to a Decode.

    ``tokens``, ``prompt_logprobs`` and ``drafts`` come with the sequence id they belong to, as of the command that
    produced them. A sequence whose drafts were accepted has several tokens. ``prompt_logprobs`` are those of the step's
    chunks. ``evaluations``: the likeliest next tokens of rows, likeliest first. ``seconds``: duration of the step on
    the shard, of which ``forward_s`` computing and ``sample_s`` choosing tokens.
    """

    shard: str
    command_id: int
    outcome: StepOutcome
    tokens: tuple[tuple[int, GeneratedToken], ...]
    seconds: float
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_logprobs: tuple[tuple[int, tuple[PromptToken, ...]], ...] = ()
    drafts: tuple[tuple[int, DraftCount], ...] = ()
    evaluations: tuple[tuple[int, tuple[Alternative, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The reply to a Save. For each entry: whether a run with its key is there now, and the bytes written for it."""

    shard: str
    command_id: int
    saved: tuple[bool, ...]
    sizes_bytes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The reply to a Load: one flag for each entry. ``bad_runs``: keys of runs that the shard does not have."""

    shard: str
    command_id: int
    loaded: tuple[bool, ...]
    bad_runs: tuple[bytes, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSet:
    """The reply to a SetLayout: the limits now, and the ids of sequences that could not be moved, which are free."""

    shard: str
    command_id: int
    layout: LayoutLimits
    lost: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The reply to a Fetch, with one flag for each key. None is true if the call failed."""

    transfer_id: int
    fetched: tuple[bool, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """No more replies will come for this command."""

    shard: str
    command_id: int


@dataclass(frozen=True, slots=True)
class FlushRequested:
    """An operator wants ``shards`` to give up the cells of ended sequences. `Flushed` of the same id answers."""

    flush_id: int
    shards: frozenset[str]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Submitted
    | Cancelled
    | ShardJoined
    | ShardLost
    | ShardDraining
    | Stepped
    | Saved
    | Loaded
    | LayoutSet
    | Fetched
    | CommandEnded
    | FlushRequested
    | Tick
)
