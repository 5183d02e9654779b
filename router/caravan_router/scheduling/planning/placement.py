"""Which shard takes a request: decided when one can take it now, never before."""

from collections.abc import Iterable
from dataclasses import dataclass

from caravan_router.scheduling.planning.step_plan import Draft
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.shard.prefix_tree import Match
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.waiting.queue import HOLD, Hold

# What it costs a request to share a shard with one more sequence, in prompt tokens that could be computed meanwhile.
_TOKENS_PER_RESIDENT = 64
# A prefix shorter than this is computed again rather than waited for.
_LEAST_PREFIX_TO_WAIT_FOR = 16


@dataclass(frozen=True, slots=True)
class Place:
    """On ``draft``, starting with what ``match`` found there. ``restore``: from the shard's swap space."""

    draft: Draft
    match: Match
    restore: bool = False


def choose(drafts: list[Draft], shards: Iterable[ShardState], sequence: Sequence) -> Place | Hold | None:
    """Where ``sequence`` starts soonest and disturbs least.

    A shard that holds more of its tokens is preferred, one with fewer residents too. HOLD: a prefix of it is being
    computed for another request, and waiting for that is sooner than computing it again anywhere. None: nothing can
    take it now, or an emptier shard will in one pass: being first in a fuller batch costs every token more.
    """
    ticket = sequence.ticket
    if ticket is not None:
        for draft in drafts:
            if draft.shard.name == ticket.shard and (match := draft.restorable(sequence)) is not None:
                return Place(draft, match, restore=True)
    known = sequence.known_tokens
    best: Place | None = None
    best_rank: tuple[int, int, str] | None = None
    for draft in drafts:
        if not draft.is_open:
            continue
        match = draft.shard.match(sequence)
        swapped_here = ticket is not None and ticket.shard == draft.shard.name and ticket.start <= match.length
        if swapped_here or not draft.can_admit(sequence, match):
            continue  # what was swapped out here is not computed again because it has to wait a little
        shard = draft.shard
        cost = known - match.length + _TOKENS_PER_RESIDENT * len(shard.residents)
        rank = (cost, -shard.free_cells, shard.name)
        if best_rank is None or rank < best_rank:
            best, best_rank = Place(draft, match), rank
    if best is None or best_rank is None:
        return None
    for shard in shards:
        if _waits_for_prefix(shard, sequence, best_rank[0], best):
            return HOLD
        if (
            len(shard.residents) < len(best.draft.shard.residents)
            and shard.completes_prefill
            and shard.free_sequences > 0
            and best.match.length == 0
        ):
            return None
    return best


def _waits_for_prefix(shard: ShardState, sequence: Sequence, cost: int, best: Place) -> bool:
    """Whether a prompt under way on ``shard`` will soon provide more of ``sequence`` than ``best`` has, and cheaper."""
    if shard.limits.whole_only or shard.draining:
        return False
    here = best.match.length if shard is best.draft.shard else 0
    for leader in shard.prefilling:
        if leader.priority < sequence.spec.priority:
            continue  # others may come before it yet
        common = _common(leader, sequence)
        if common < here + _LEAST_PREFIX_TO_WAIT_FOR or (
            common <= leader.computed and leader.begun and shard is best.draft.shard
        ):
            continue
        remaining = max(0, common - leader.computed)
        waiting_cost = remaining + sequence.known_tokens - common + _TOKENS_PER_RESIDENT * (len(shard.residents))
        if shard is best.draft.shard or waiting_cost < cost:
            return True
    return False


def _common(leader: Resident, sequence: Sequence) -> int:
    """Tokens at the start of both, less the last of ``sequence``; compared once."""
    other = leader.sequence
    if other.request.prefix_namespace != sequence.request.prefix_namespace or sequence.needs_prompt_logprobs:
        return 0
    key = other.request.request_id
    found = sequence.common.get(key)
    if found is None:
        found = sequence.common[key] = _common_length(
            other.tokens(0, leader.target), sequence.tokens(0, sequence.known_tokens - 1)
        )
    return found


def _common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    low, high = 0, min(len(a), len(b)) + 1  # the first `low` are equal; `high` is out of reach
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
