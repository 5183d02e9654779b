"""Which shard takes a request: decided when one can take it now, never before."""

from caravan_router.scheduling.draft import Draft
from caravan_router.scheduling.sequence import Sequence


def choose(drafts: list[Draft], sequence: Sequence) -> Draft | None:
    """The draft to put ``sequence`` on: of those with room, the one with the fewest residents, then most free cells."""
    fitting = [draft for draft in drafts if draft.can_admit(sequence)]
    if not fitting:
        return None
    return min(fitting, key=lambda draft: (len(draft.shard.residents), -draft.shard.free_cells, draft.shard.name))
