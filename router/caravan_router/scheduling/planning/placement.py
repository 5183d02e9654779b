"""Which shard takes a request: decided when one can take it now, never before."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from caravan_router.scheduling.planning.openings import Openings
from caravan_router.scheduling.planning.step_plan import StepPlan
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.ledger import ShardLedger
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


def choose(openings: Openings, plan_of: Callable[[ShardLedger], StepPlan], sequence: Sequence) -> Place | NotNow:
    """Return where ``sequence`` starts soonest and disturbs least. ``plan_of``: returns the next step of a shard.

    Shards that hold more of its tokens, and shards with fewer residents, are preferred. NO_ROOM: nothing can take it
    now, or an emptier shard will after one step: being first in a fuller batch costs every token more.
    """
    looks = sorted([_look(shard, sequence) for shard in openings.open_to(sequence)], key=_look_cost)
    if _is_postponed(openings, looks, sequence):
        openings.note_postponed(looks[0].shard)
        return NotNow.NO_ROOM
    best = _cheapest(openings, plan_of, looks, sequence)
    if best is None:
        openings.note_refused(sequence)
        return NotNow.NO_ROOM
    for leader, shard in openings.prompts_like(sequence):
        wait_cost = _cost_of_waiting(leader, shard, sequence, best)
        if wait_cost is not None:
            openings.note_awaited(
                sequence, leader, best.plan.shard, (wait_cost - sequence.known_tokens) / _TOKENS_PER_RESIDENT
            )
            return NotNow.PREFIX_COMING
    here = best.plan.shard
    suspects = [one for one in here.prefilling if one.sequence.is_suspect] if sequence.is_suspect else []
    if suspects:
        # One at a time, so that another loss tells which of them it was.
        openings.note_awaited(sequence, suspects[0], here, len(here.residents))
        return NotNow.PREFIX_COMING
    if best.cached == 0 and openings.soon_better(here):
        openings.note_postponed(here)
        return NotNow.NO_ROOM
    return best


def _is_postponed(openings: Openings, looks: list["_Look"], sequence: Sequence) -> bool:
    """Whether ``sequence`` waits for an emptier shard wherever it has room now, so that no plan needs to be made."""
    if any(look.cached for look in looks) or any(openings.prompts_like(sequence)):
        return False
    return bool(looks) and openings.soon_better(looks[0].shard)


def _cheapest(
    openings: Openings, plan_of: Callable[[ShardLedger], StepPlan], looks: list["_Look"], sequence: Sequence
) -> Place | None:
    """Return the first place of ``looks`` that has room. Plans are made for the shards that come into question only."""
    for _, equals in itertools.groupby(looks, key=_look_cost):
        for look in _by_room(list(equals)):
            plan = plan_of(look.shard)
            if plan.can_load(sequence) if look.saved.length else plan.can_admit(sequence, look.match):
                return Place(plan, look.match, look.saved)
            if plan.is_open and plan.adapter == sequence.spec.adapter:
                openings.note_short(look.shard)
    return None


class _Look(NamedTuple):
    """What ``shard`` has of a request, and what starting there costs, in prompt tokens.

    A named tuple, since one is made for each open shard and request.
    """

    shard: ShardLedger
    match: Match
    saved: SavedPrefix
    cached: int
    cost: int


def _look(shard: ShardLedger, sequence: Sequence) -> _Look:
    match = shard.match(sequence)
    saved = shard.saved_prefix(sequence, match.length) if shard.can_save else NO_PREFIX
    cached = max(match.length, saved.length)
    return _Look(shard, match, saved, cached, _cost(shard, sequence, cached))


def _look_cost(look: _Look) -> int:
    return look.cost


def _by_room(looks: list[_Look]) -> list[_Look]:
    """Return ``looks`` by free cells, most first, and then by name."""
    if len(looks) == 1:
        return looks
    return sorted(looks, key=lambda look: (-look.shard.free_cells, look.shard.name))


def _cost(shard: ShardAccount, sequence: Sequence, cached: int) -> int:
    """Return what starting here costs, in prompt tokens. ``cached``: its first tokens, which need not be computed."""
    return sequence.known_tokens - cached + _TOKENS_PER_RESIDENT * len(shard.residents)


def _cost_of_waiting(leader: Resident, shard: ShardAccount, sequence: Sequence, best: Place) -> int | None:
    """Return what starting costs, in tokens, once the prompt of ``leader`` on ``shard`` is there.

    None if that prompt provides no more than ``best`` has, or if starting in ``best`` costs less.
    """
    if shard.layout.whole_only or sequence.needs_prompt_logprobs:
        return None
    if leader.priority < sequence.spec.priority:
        return None  # others may come before it yet
    is_here = shard is best.plan.shard
    common = _common(leader, sequence)
    is_there_already = common <= leader.computed and leader.is_running and is_here
    if common < (best.cached if is_here else 0) + _LEAST_PREFIX_TO_WAIT_FOR or is_there_already:
        return None
    now = _cost(best.plan.shard, sequence, best.cached)
    later = max(0, common - leader.computed) + _cost(shard, sequence, common)
    if is_here:
        return min(now, later)
    return later if later < now else None


def _common(leader: Resident, sequence: Sequence) -> int:
    """Return how many first tokens both have in common, without the last of ``sequence``. Compared once a pair."""
    other = leader.sequence
    if other.request.prefix_namespace != sequence.request.prefix_namespace:
        return 0
    found = sequence.common.get(other.request_id)
    if found is None:
        theirs, own = other.tokens(0, leader.target), sequence.tokens(0, sequence.most_cached)
        # Mostly as much as with the request before: a prompt that several have in common.
        guess = next(reversed(sequence.common.values()), 0)
        is_right = guess < min(len(theirs), len(own)) and theirs[guess] != own[guess] and theirs[:guess] == own[:guess]
        found = sequence.common[other.request_id] = guess if is_right else common_length(theirs, own)
    return found
