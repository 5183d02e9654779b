"""The state of each shard, for operators."""

from dataclasses import dataclass
from enum import Enum

from caravan_proto.messages.adapters import LoadedAdapter
from caravan_proto.messages.model import Numerics


class ShardState(Enum):
    """The state of a shard. The values are part of the HTTP API."""

    # It has not served since its address is known.
    JOINING = "joining"
    SERVING = "serving"
    # Another router holds it, and has been asked for it.
    STANDBY = "standby"
    # It ends, goes to another router, or its address is not listed any more: what it has moves to others or ends.
    DRAINING = "draining"
    # It answers, and may not serve beside the others.
    REFUSED = "refused"
    # It served before.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStanding:
    """The state of a shard since ``since_s``, in seconds on ``time.monotonic``.

    ``reason`` says why the shard does not serve, "" if there is nothing to say. ``next_try_s``: when the router asks a
    shard again that does not serve, on the same clock; None if it is being asked or serves.
    """

    state: ShardState
    since_s: float
    reason: str = ""
    next_try_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRoom:
    """The capacity of a shard in its current layout. ``unified``: any sequence may use any cell.

    ``draft_tokens``: most draft tokens of a step; 0 if the memory of its sequences cannot be cut back.
    """

    max_sequences: int
    max_batch_tokens: int
    cells: int
    cells_per_sequence: int
    unified: bool
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReport:
    """One shard. ``epoch`` numbers the last lease that the router held, 0 before the first.

    ``shard_id``, ``version``, ``model``, ``model_fingerprint``, ``room`` and ``numerics`` are what the shard said of
    itself, "" and None until it has answered. ``sequences`` run there and use ``used_cells``.
    ``adapters``: those that were loaded while it ran.
    """

    address: str
    standing: ShardStanding
    epoch: int
    shard_id: str = ""
    version: str = ""
    model: str = ""
    model_fingerprint: str = ""
    room: ShardRoom | None = None
    numerics: Numerics | None = None
    sequences: int = 0
    used_cells: int = 0
    adapters: tuple[LoadedAdapter, ...] = ()
