"""What happens to the scheduler: a closed union of events."""

from dataclasses import dataclass
from enum import Enum

from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.scheduling.sequence import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLimits:
    """What fits on a shard: cells, cells per sequence, sequences, tokens in one step, bytes of swap space.

    ``shares_cells``: sequences with a common prefix hold its cells once (the unified layout), else each has a copy.
    ``whole_only``: a sequence can only be copied as it is, never cut back (recurrent memory).
    ``max_prompt_logprob_tokens``: prompt tokens of one step whose logprobs are returned, all sequences together.
    """

    cells: int
    cells_per_sequence: int
    max_sequences: int
    max_batch_tokens: int
    shares_cells: bool = True
    whole_only: bool = False
    swap_bytes: int = 0
    max_prompt_logprob_tokens: int = 1


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
    """A shard was leased and is empty."""

    shard: str
    limits: ShardLimits


@dataclass(frozen=True, slots=True)
class ShardLost:
    """A shard is gone with all it held. Ignored if it never joined."""

    shard: str


@dataclass(frozen=True, slots=True)
class ShardDraining:
    """A shard is about to end: it serves the sequences it has and takes no others."""

    shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """A step has ended: the reply to a Prefill, or one of the replies to a Decode.

    ``tokens`` and ``prompt_logprobs`` come with the sequence id they belong to, as of the command that produced them.
    ``prompt_logprobs`` are those of the step's chunks. ``seconds``: duration of the step on the shard, of which
    ``forward_s`` computing and ``sample_s`` choosing tokens.
    """

    shard: str
    command_id: int
    outcome: StepOutcome
    tokens: tuple[tuple[int, GeneratedToken], ...]
    seconds: float
    forward_s: float = 0.0
    sample_s: float = 0.0
    prompt_logprobs: tuple[tuple[int, tuple[PromptToken, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """The reply to a SwapOut: one flag for each entry. ``used_bytes`` of swap space are in use afterwards."""

    shard: str
    command_id: int
    saved: tuple[bool, ...]
    seconds: float
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedIn:
    """The reply to a SwapIn: one flag for each entry. ``used_bytes`` of swap space are in use afterwards."""

    shard: str
    command_id: int
    restored: tuple[bool, ...]
    seconds: float
    used_bytes: int = 0


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
    | SwappedOut
    | SwappedIn
    | CommandEnded
    | FlushRequested
    | Tick
)
