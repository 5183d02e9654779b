"""How many draft tokens a Decode may carry.

Drafts use cells that are free anyway: nothing is evicted or preempted for them. No sequence gets more tokens by a
Decode than it may have steps, so all that the Decode can take is promised while it runs (`InFlight.coming_cells`), and
leaves room for the steps after it.
"""

from collections.abc import Sequence

from caravan_scheduler.planning.forecast import GROWTH_CELLS
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import UNSEEN_STEPS
from caravan_scheduler.shard.resident import Resident


def draft_plan(shard: ShardAccount, residents: Sequence[Resident], steps: int) -> tuple[int, int]:
    """Return the most steps of a Decode, at most ``steps``, and the most draft tokens of each of them.

    There are none if too few cells are free.
    """
    limits = shard.capacity.limits
    most = min(limits.draft_tokens, limits.max_batch_tokens - len(residents))
    if most <= 0:
        return steps, 0
    drafts = min(most, sum([resident.sequence.spec.max_draft_tokens for resident in residents]))
    if drafts <= 0 or shard.capacity.is_bounded_by_sequence:
        return steps, max(0, drafts)
    with_drafts = min(steps, shard.cells.free // len(residents) - GROWTH_CELLS)
    return (with_drafts, drafts) if with_drafts > UNSEEN_STEPS else (steps, 0)
