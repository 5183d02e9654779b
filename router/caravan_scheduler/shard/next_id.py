"""Which id a sequence gets that starts: a free one, or that of a parked sequence."""

from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident


def to_evict(shard: ShardAccount) -> Resident | None:
    """Return the parked sequence whose id the next one gets; None if it gets the lowest free one.

    In the split layout, llama.cpp computes neighbouring ids in one pass, and each gap between them takes one more. So
    while others run, the lowest id is taken that is free or of a sequence that is saved.
    """
    free = min(shard.stays.free_ids, default=None)
    keeps_order = shard.layout.shares_cells or not shard.stays.residents
    if free is not None and keeps_order:
        return None
    evictable = shard.header.evictable
    saved = [one for one in evictable if one.is_expendable]
    if not saved:
        return evictable[0] if free is None else None
    chosen = saved[0] if keeps_order else min(saved, key=lambda one: one.sequence_id)
    return chosen if free is None or chosen.sequence_id < free else None
