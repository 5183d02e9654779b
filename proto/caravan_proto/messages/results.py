"""What commands result in. ``shard`` and ``command_id`` are the router's own and do not travel."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from caravan_proto.messages.limits import LayoutLimits


class FinishReason(Enum):
    """Why a sequence ended. The values are TGI's words, but for the last two, which TGI does not have.

    A shard knows no STOP_SEQUENCE: stop strings are text.
    """

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"
    # The output does not match its constraint and cannot go on. Clients see an error.
    CONSTRAINT_FAILED = "constraint_failed"


class StepOutcome(Enum):
    """How a step ended. Any outcome but OK left the sequences of the shard as they were."""

    OK = "ok"
    NO_KV = "no_kv"
    ABORTED = "aborted"
    # Embeddings of media are not on the shard.
    MEDIA_MISSING = "media_missing"


class DraftSource(Enum):
    """Where draft tokens come from. The values are metric labels and names in replies."""

    # What the client predicts the output to be.
    PREDICTION = "prediction"
    # The sequence's own prompt and output, behind an earlier occurrence of its last tokens.
    CONTEXT = "context"
    # Tokens that the constraint forces.
    CONSTRAINT = "constraint"
    # A draft model.
    MODEL = "model"
    # Ended outputs of the same API key and salt.
    POOL = "pool"


class DraftCount(NamedTuple):
    """How many draft tokens of one source there were, and how many of them the output has."""

    source: DraftSource
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The reply to a Save. For each entry: whether a run with its key is there now, and the bytes written for it."""

    shard: str = ""
    command_id: int = 0
    saved: Sequence[bool]
    sizes_bytes: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The reply to a Load: one flag for each entry. ``bad_runs``: keys of runs that are unknown or damaged."""

    shard: str = ""
    command_id: int = 0
    loaded: Sequence[bool]
    bad_runs: Sequence[bytes]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSet:
    """The reply to a SetLayout: the limits now, and the ids of sequences that could not be moved, which are free.

    ``shares_beginnings``: where the cells are unified now, sequences with equal beginnings share the cells of these.
    """

    shard: str = ""
    command_id: int = 0
    layout: LayoutLimits
    lost: Sequence[int]
    seconds: float
    shares_beginnings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The reply to a FilterBatch: the cells that no sequence holds, and the ids of the sequences that are held."""

    free_cells: int
    sequence_ids: Sequence[int]
