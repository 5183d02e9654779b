"""Which shard takes a request: decided when one can take it now, never before."""

from collections.abc import Iterable
from dataclasses import dataclass

from caravan_router.scheduling.planning.step_plan import StepPlan
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.prefix_tree import Match, common_length
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.shard.saved_runs import NO_PREFIX, SavedPrefix
from caravan_router.scheduling.waiting.queue import NotNow

# What sharing a shard with one more sequence costs a request, in prompt tokens that could be computed in that time.
_TOKENS_PER_RESIDENT = 64
# A shorter prefix is computed again rather than waited for.
_LEAST_PREFIX_TO_WAIT_FOR = 16


@dataclass(frozen=True, slots=True)
class Place:
    """A request starts in ``plan`` from the prefix that ``match`` found in the cache, or from ``saved`` runs."""

    plan: StepPlan
    match: Match
    saved: SavedPrefix = NO_PREFIX

    @property
    def cached(self) -> int:
        """Its first tokens that need not be computed."""
        return max(self.match.length, self.saved.length)


def choose(plans: list[StepPlan], shards: Iterable[ShardAccount], sequence: Sequence) -> Place | NotNow:
    """Return where ``sequence`` starts soonest and disturbs least.

    Shards that hold more of its tokens, and shards with fewer residents, are preferred. NO_ROOM: nothing can take it
    now, or an emptier shard will after one step: being first in a fuller batch costs every token more.
    """
    best = _cheapest(plans, sequence)
    if best is None:
        return NotNow.NO_ROOM
    for shard in shards:
        if _waits_for_prefix(shard, sequence, best):
            return NotNow.PREFIX_COMING
        if best.cached == 0 and _is_soon_better(shard, best.plan.shard):
            return NotNow.NO_ROOM
    return best


def _cheapest(plans: list[StepPlan], sequence: Sequence) -> Place | None:
    places: list[tuple[tuple[int, int, str], Place]] = []
    for plan in plans:
        shard = plan.shard
        match = shard.match(sequence)
        place = Place(plan, match, shard.saved_prefix(sequence, match.length))
        if plan.can_load(sequence) if place.saved.length else plan.can_admit(sequence, match):
            rank = (_cost(shard, sequence, place.cached), -shard.free_cells, shard.name)
            places.append((rank, place))
    return min(places, key=lambda ranked: ranked[0])[1] if places else None


def _cost(shard: ShardAccount, sequence: Sequence, cached: int) -> int:
    """Return what starting here costs, in prompt tokens. ``cached``: its first tokens, which need not be computed."""
    return sequence.known_tokens - cached + _TOKENS_PER_RESIDENT * len(shard.residents)


def _is_soon_better(shard: ShardAccount, than: ShardAccount) -> bool:
    return len(shard.residents) < len(than.residents) and shard.completes_prefill and shard.free_sequences > 0


def _waits_for_prefix(shard: ShardAccount, sequence: Sequence, best: Place) -> bool:
    """Whether a prompt under way on ``shard`` will soon provide more of ``sequence`` than ``best`` has, and cheaper."""
    if shard.layout.whole_only or shard.draining or sequence.needs_prompt_logprobs:
        return False
    is_here = shard is best.plan.shard
    cached = best.cached if is_here else 0
    for leader in shard.prefilling:
        if leader.priority < sequence.spec.priority:
            continue  # others may come before it yet
        common = _common(leader, sequence)
        is_there_already = common <= leader.computed and leader.is_running and is_here
        if common < cached + _LEAST_PREFIX_TO_WAIT_FOR or is_there_already:
            continue
        to_compute = max(0, common - leader.computed)
        if is_here or to_compute + _cost(shard, sequence, common) < _cost(best.plan.shard, sequence, best.cached):
            return True
    return False


def _common(leader: Resident, sequence: Sequence) -> int:
    """Return how many first tokens both have in common, without the last of ``sequence``. Compared once a pair."""
    other = leader.sequence
    if other.request.prefix_namespace != sequence.request.prefix_namespace:
        return 0
    found = sequence.common.get(other.request_id)
    if found is None:
        found = common_length(other.tokens(0, leader.target), sequence.tokens(0, sequence.known_tokens - 1))
        sequence.common[other.request_id] = found
    return found
