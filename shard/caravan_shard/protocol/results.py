"""What the worker answers."""

from dataclasses import dataclass, field
from enum import Enum

from caravan_proto.errors import ShardError
from caravan_shard.arrays import Floats


@dataclass(frozen=True, slots=True)
class Refusal:
    """The command was refused and changed nothing."""

    error: ShardError
    sentence: str


def bad_request(sentence: str) -> Refusal:
    """A command that no state of the shard would allow."""
    return Refusal(ShardError.BAD_REQUEST, sentence)


class StepOutcome(Enum):
    """How a pass went that was allowed to run; all but OK left the sequences as they were."""

    OK = "ok"
    NO_KV = "no_kv"
    ABORTED = "aborted"


class FinishReason(Enum):
    """Why a sequence ended on the shard."""

    EOS = "eos"
    LENGTH = "length"


@dataclass(slots=True)
class TokenRows:
    """Columns: the n-th entry of each list is the same sampled token.

    ``logprobs`` (NaN where not asked) and ``top_counts`` are empty when no row asked; the alternatives of all rows
    follow one another in the ``top_`` lists.
    """

    sequence_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)
    specials: list[bool] = field(default_factory=list)
    finish_reasons: list[FinishReason | None] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    top_pieces: list[bytes] = field(default_factory=list)
    top_specials: list[bool] = field(default_factory=list)


@dataclass(slots=True)
class PromptRows:
    """Columns: of each sequence ``counts`` prompt tokens, in order; ``logprobs`` and ``top_counts`` are a token's.

    NaN and no alternatives for the first token of a prompt: nothing comes before it.
    """

    sequence_ids: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_counts: list[int] = field(default_factory=list)
    top_token_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)
    top_pieces: list[bytes] = field(default_factory=list)
    top_specials: list[bool] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Nanoseconds of one pass; ``total_ns`` starts when the command was taken or the previous pass ended."""

    forward_ns: int
    sample_ns: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """One pass; ``prompt`` if prompt tokens were told of."""

    outcome: StepOutcome
    rows: TokenRows
    timings: Timings
    prompt: PromptRows | None = None


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is left after FilterBatch."""

    free_cells: int
    sequence_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedOut:
    """``saved`` has an entry for each asked; ``written_bytes`` of this command, ``used_bytes`` of the swap space."""

    saved: list[bool]
    written_bytes: int
    used_bytes: int
    total_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwappedIn:
    """``restored`` has an entry for each asked; ``used_bytes`` of the swap space."""

    restored: list[bool]
    used_bytes: int
    total_ns: int


@dataclass(frozen=True, slots=True)
class Vector:
    """[embedding_size], of length 1."""

    values: Floats


Result = StepResult | Holdings | SwappedOut | SwappedIn | Vector | Refusal
