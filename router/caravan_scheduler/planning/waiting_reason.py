"""What a waiting request waits for, told to those who watch. Nothing is decided by it."""

from dataclasses import dataclass
from enum import Enum

from caravan_scheduler.planning.shard_index import ShardIndex
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.state import SchedulerState


class WaitingReason(Enum):
    """Why a request waits."""

    NO_SHARD = "no_shard"
    # Another request is computing what it begins with.
    PREFIX = "prefix"
    # A busy shard has what it begins with, and waiting for that costs less than computing it elsewhere.
    HOLDER = "holder"
    # What was saved of it is copied to the shard on which it will start.
    FETCH = "fetch"
    # The shard on which it will start encodes its pictures or sounds.
    ENCODING = "encoding"
    # No shard has the cells.
    CELLS = "cells"
    # All places for sequences are taken.
    SEQUENCES = "sequences"
    # The shards with a free place are in a step that cannot be cut short, or their next one is full.
    STEP = "step"
    # Others go first.
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Why:
    """A reason, with the shard or the request that is waited for, if it is one."""

    reason: WaitingReason
    shard: str = ""
    request_id: int = 0


def why_waiting(sequence: Sequence, state: SchedulerState, index: ShardIndex) -> Why:
    """Return what ``sequence``, which is in the queue, waits for, as far as the last plan knows."""
    shards = state.shards
    if not shards:
        return Why(WaitingReason.NO_SHARD)
    if (holder := index.queues.shard_of(sequence.request_id)) is not None:
        return Why(WaitingReason.HOLDER, shard=holder)
    awaited = index.prompts.awaited.get(sequence.request_id)
    if awaited is not None and not awaited.is_over(index.clock.now_s):
        return Why(WaitingReason.PREFIX, request_id=awaited.leader.request_id)
    if state.transfers.is_awaited_by(sequence.request_id):
        return Why(WaitingReason.FETCH)
    if state.encodings.are_awaited_by(sequence.request_id):
        return Why(WaitingReason.ENCODING)
    able = [name for name, shard in shards.items() if shard.stays.free_sequences > 0]
    if not able:
        return Why(WaitingReason.SEQUENCES)
    if sequence.request_id in index.open.refused:
        return Why(WaitingReason.CELLS if index.open.without_cells.issuperset(able) else WaitingReason.STEP)
    return Why(WaitingReason.TURN if index.open.by_name else WaitingReason.STEP)
