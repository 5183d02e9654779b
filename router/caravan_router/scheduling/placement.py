"""Which shard takes a request: decided when one can take it now, never before."""

from collections.abc import Iterable

from caravan_router.scheduling.draft import Draft
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard_state import ShardState


def choose(drafts: list[Draft], shards: Iterable[ShardState], sequence: Sequence) -> Draft | None:
    """The draft to put ``sequence`` on: of those with room, the one with the fewest residents, then most free cells.

    None if there is none, or if an emptier shard with room is only one pass away from taking it: being first in a
    fuller batch costs every token more than that pass costs once.
    """
    fitting = [draft for draft in drafts if draft.can_admit(sequence)]
    if not fitting:
        return None
    best = min(fitting, key=lambda draft: (len(draft.shard.residents), -draft.shard.free_cells, draft.shard.name))
    residents = len(best.shard.residents)
    for shard in shards:
        if len(shard.residents) < residents and shard.completes_prefill and shard.can_hold(sequence):
            return None
    return best
