"""Bulk work: requests of the lowest priority, which fill the steps of a shard that nothing else needs."""

from collections.abc import Collection

from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.waiting.queue import effective_priority

# Of so many sequence ids of a shard, bulk work leaves one free, so that others need not take its cells to start.
_IDS_FOR_EACH_FREE = 8
# What was used by others in this time is likely to be used again, and bulk work takes no cells of it.
_KEPT_S = 60.0
# Bulk work that pauses keeps its place while so many of the cells are free.
_FREE_CELLS = 0.25


def yields(sequence: Sequence, now: float, aging_s: float) -> bool:
    """Whether ``sequence`` is bulk work that has not waited so long that it counts as any other request."""
    return sequence.is_bulk and effective_priority(sequence.request, now, aging_s) < 0


def yielding(shard: ShardAccount, now: float, aging_s: float) -> Collection[Resident]:
    """Return the residents of ``shard`` that pause while others run there."""
    if not shard.stays.bulk:
        return ()
    # In order: a set of objects has another order each time, and a recording could not be played again.
    return dict.fromkeys(one for one in shard.stays.residents.values() if yields(one.sequence, now, aging_s))


def kept_from(shard: ShardAccount, sequence: Sequence, now: float, aging_s: float, *, urgent: bool) -> int | None:
    """Return how many parked cells ``sequence`` may not take because it yields; None if it may not start now.

    ``urgent``: whether others wait.
    """
    stays = shard.stays
    if not yields(sequence, now, aging_s):
        return 0
    if stays.residents and (urgent or len(yielding(shard, now, aging_s)) < len(stays.residents)):
        return None
    kept = [key for key, one in stays.parked.items() if not one.sequence.is_bulk and now - one.last_used_s < _KEPT_S]
    free = stays.free_sequences
    if free - len(kept) <= (free + len(stays.residents)) // _IDS_FOR_EACH_FREE:
        return None
    return shard.cells.tree.own_cells(kept) if kept else 0


def crowding(shard: ShardAccount, now: float, aging_s: float) -> Collection[Resident]:
    """Return the residents of ``shard`` that pause and should rather wait: others need ids or cells to be kept.

    What is computed of them stays parked, as the first to be evicted.
    """
    bulk, stays = yielding(shard, now, aging_s), shard.stays
    if not bulk or len(bulk) == len(stays.residents) or any(one.sequence.is_bulk for one in stays.parked.values()):
        return ()
    has_ids = bool(stays.free_ids or stays.releasing)
    return () if has_ids and shard.cells.free >= _FREE_CELLS * shard.capacity.cells else bulk
