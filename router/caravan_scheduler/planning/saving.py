"""Which ended sequences are saved now, so that their cells and ids can be given to others without loss."""

from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.prefix_reuse import copy_s
from caravan_scheduler.shard.resident import Resident

# Cells that one Save copies while sequences run: some 12 ms for a small model.
_MOST_CELLS_AT_ONCE = 2048
# A Save that only closes a gap between ids may delay a step by so many seconds.
_SHORT_S = 0.05
# A shard counts as idle when its last sequence ended this long ago, in seconds: a client may ask again at once.
_IDLE_S = 0.2


def to_save(shard: ShardAccount, now: float, waiting: int) -> list[Resident]:
    """Return the parked sequences that the next command should save, least recently used first.

    In the unified layout their cells slow down every step, so they are saved and released at once unless requests wait,
    which may start from them. In the split layout they are saved while the shard is idle, when every id that could be
    taken holds something that is not saved, and where their ids are between those of running sequences: each gap there
    takes a pass of its own, and is closed when a request starts. A shard that drains saves everything once its last
    sequence has gone. What holds a pinned prefix that is not saved is saved at once.
    """
    if not shard.saves.are_possible:
        return []
    unsaved = [resident for resident in shard.stays.parked.values() if not resident.is_expendable]
    if not unsaved:
        return []
    if shard.drain.has_begun:
        return [] if shard.stays.residents else unsaved
    if pinned := [resident for resident in unsaved if resident.is_pinned]:
        return pinned[:1]
    if shard.layout.shares_cells and not waiting:
        return _within(unsaved, _MOST_CELLS_AT_ONCE)
    highest = max(shard.stays.residents, default=-1)
    below = (resident for resident in unsaved if resident.sequence_id < highest)
    if between := [resident for resident in below if copy_s(shard, resident.computed) <= _SHORT_S]:
        return [min(between, key=lambda resident: resident.sequence_id)]
    can_take = bool(shard.stays.free_ids or shard.stays.releasing) or len(unsaved) < len(shard.stays.parked)
    is_idle = not shard.stays.residents and not shard.commands.in_flight and now - unsaved[-1].last_used_s >= _IDLE_S
    if can_take and not is_idle:
        return []
    return unsaved[:1]


def _within(residents: list[Resident], cells: int) -> list[Resident]:
    """Return the first of ``residents`` with at most ``cells`` cells together, and at least one."""
    found: list[Resident] = []
    for resident in residents:
        cells -= resident.computed
        if found and cells < 0:
            break
        found.append(resident)
    return found


def releases(shard: ShardAccount, waiting: int) -> bool:
    """Whether parked sequences are released when they are saved."""
    return shard.drain.has_begun or (shard.layout.shares_cells and not waiting)
