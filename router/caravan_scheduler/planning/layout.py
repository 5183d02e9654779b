"""When a shard's KV cache changes its layout.

The split layout is faster, since attention looks at the cells of its own sequence only. The unified layout lets one
sequence use every cell. A change takes a fraction of a second, and all sequences of the shard wait for it.
"""

from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.capacity import fits_for_now
from caravan_scheduler.shard.resident import Resident

# A shard with running sequences keeps a layout for at least this long, in seconds.
_LEAST_STAY_S = 10.0
# A sequence is moved when it has room for no more than this many tokens.
_LAST_CELLS = 8


def needs_other_layout(shard: ShardAccount, first: Sequence | None) -> bool:
    """Whether a resident, or the ``first`` waiting request, is too long for the current layout and fits the other."""
    other = shard.capacity.limits.other_layout
    if other is None or other.cells_per_sequence <= shard.layout.cells_per_sequence:
        return False
    if any(_is_outgrown(shard, resident) for resident in shard.stays.residents.values()):
        return True
    if first is None or shard.drain.has_begun or not shard.capacity.could_ever_hold(first):
        return False
    return not fits_for_now(first, shard.layout)


def _is_outgrown(shard: ShardAccount, resident: Resident) -> bool:
    room = shard.layout.cells_per_sequence - max(resident.target, resident.computed)
    return shard.capacity.could_outgrow(resident) and room <= _LAST_CELLS


def may_return(shard: ShardAccount, first: Sequence | None, lengths: OutputLengths, now: float) -> bool:
    """Whether the faster layout has room for all residents, as long as they are expected to get, and for ``first``.

    It needs room for what jobs have in cells, too: it would be lost, and their next requests need this layout again.
    """
    other = shard.capacity.limits.other_layout
    if other is None or not shard.layout.shares_cells or shard.drain.has_begun:
        return False
    if first is not None and not fits_for_now(first, other):
        return False
    if shard.stays.residents and now - shard.capacity.layout_set_s < _LEAST_STAY_S:
        return False
    parked = shard.stays.parked.values()
    if any(one.computed > other.cells_per_sequence and shard.is_expected(one) for one in parked):
        return False
    return all(_fits(resident.sequence, other, lengths) for resident in shard.stays.residents.values())


def immovable(shard: ShardAccount, other: LayoutLimits) -> list[Resident]:
    """Return the parked sequences that do not move to the layout ``other``: those that are saved, or do not fit."""
    parked = shard.stays.parked.values()
    if shard.saves.are_possible or shard.layout.saving is Saving.NOTHING:
        return list(parked)
    return [one for one in parked if one.computed > other.cells_per_sequence]


def _fits(sequence: Sequence, layout: LayoutLimits, lengths: OutputLengths) -> bool:
    generated = len(sequence.output)
    to_come = lengths.expected(generated, sequence.spec.stopping.max_new_tokens) - generated
    return sequence.known_tokens + to_come <= layout.cells_per_sequence and fits_for_now(sequence, layout)


def steps_left(shard: ShardAccount, residents: list[Resident]) -> int:
    """Return how many tokens each of ``residents`` can decode in the current layout; at least 1."""
    most = shard.layout.cells_per_sequence - _LAST_CELLS // 2
    lengths = (resident.computed for resident in residents if shard.capacity.could_outgrow(resident))
    return max(1, min((most - length for length in lengths), default=most))
