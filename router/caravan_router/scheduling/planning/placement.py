"""Which shard takes a request: decided when one can take it now, never before."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from caravan_router.core.common_length import common_length
from caravan_router.scheduling.planning.openings import Openings
from caravan_router.scheduling.planning.step_plan import StepPlan
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.shard.prefix_tree import NO_MATCH, Match
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.shard.saved_runs import NO_PREFIX, SavedPrefix
from caravan_router.scheduling.waiting.queue import NotNow

# A request waits for prompts under way at most so many times as long as computing all of it would take.
_MOST_WAIT = 2.0
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

    Places cost seconds: what is not cached there has to be computed, and residents share the shard. NO_ROOM: nothing
    can take it now, or an emptier shard will so soon that waiting costs less. PREFIX_COMING: waiting for its prefix, or
    for a busy shard that has it, costs less than computing it again.
    """
    looks = _looks(openings, sequence)
    if _needs_no_plan(openings, looks, sequence) and (emptier := openings.soon_better(looks[0].shard)) is not None:
        openings.note_postponed(looks[0].shard, emptier)
        return NotNow.NO_ROOM
    best = _cheapest(openings, plan_of, looks, sequence)
    if best is None:
        openings.note_refused(sequence)
        return NotNow.NO_ROOM
    here, sharing_s = best.plan.shard, openings.sharing_s(best.plan.shard)
    for leader, shard in openings.prompts_like(sequence) if openings.is_patient(sequence) else ():
        wait_cost_s = _cost_of_waiting(openings, leader, shard, sequence, best)
        if wait_cost_s is not None:
            compute_s = openings.token_s(here) * sequence.known_tokens
            most_s = _MOST_WAIT * (compute_s + sharing_s)
            openings.note_awaited(sequence, leader, here, wait_cost_s - compute_s, most_s)
            return NotNow.PREFIX_COMING
    suspects = [one for one in here.prefilling if one.sequence.is_suspect] if sequence.is_suspect else []
    if suspects:
        # One at a time, so that another loss tells which of them it was.
        openings.note_awaited(sequence, suspects[0], here, sharing_s)
        return NotNow.PREFIX_COMING
    if _waits_for_holder(openings, sequence, best):
        openings.note_willing(here)
        return NotNow.PREFIX_COMING
    if best.cached == 0 and (emptier := openings.soon_better(here)) is not None:
        openings.note_postponed(here, emptier)
        return NotNow.NO_ROOM
    return best


def _needs_no_plan(openings: Openings, looks: list["_Look"], sequence: Sequence) -> bool:
    """Whether ``sequence`` would wait for an emptier shard wherever it has room now: nothing holds it here."""
    return bool(looks) and not any(look.cached for look in looks) and not any(openings.prompts_like(sequence))


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
    """What ``shard`` has of a request, and what starting there costs, in seconds.

    A named tuple, since one is made for each open shard and request.
    """

    shard: ShardLedger
    match: Match
    saved: SavedPrefix
    cached: int
    cost_s: float


def _looks(openings: Openings, sequence: Sequence) -> list[_Look]:
    """Return what each open shard offers, the cheapest first."""
    holders = openings.may_hold(sequence)
    looks = []
    for shard in openings.open_to(sequence):
        match = shard.match(sequence) if holders is None or shard.name in holders else NO_MATCH
        saved = shard.saved_prefix(sequence, match.length) if shard.can_save else NO_PREFIX
        cached = max(match.length, saved.length)
        looks.append(_Look(shard, match, saved, cached, _cost_s(openings, shard, sequence, cached)))
    return sorted(looks, key=_look_cost) if len(looks) > 1 else looks


def _look_cost(look: _Look) -> float:
    return look.cost_s


def _by_room(looks: list[_Look]) -> list[_Look]:
    """Return ``looks`` by free cells, most first, and then by name."""
    if len(looks) == 1:
        return looks
    return sorted(looks, key=lambda look: (-look.shard.free_cells, look.shard.name))


def _cost_s(openings: Openings, shard: ShardAccount, sequence: Sequence, cached: int) -> float:
    """Return what starting here costs, in seconds. ``cached``: its first tokens, which need not be computed."""
    return openings.token_s(shard) * (sequence.known_tokens - cached) + openings.sharing_s(shard)


def _cost_of_waiting(
    openings: Openings, leader: Resident, shard: ShardAccount, sequence: Sequence, best: Place
) -> float | None:
    """Return what starting costs, in seconds, once the prompt of ``leader`` on ``shard`` is there.

    None if that prompt provides no more than ``best`` has, or if starting in ``best`` costs less.
    """
    if shard.layout.whole_only:
        return None
    if leader.priority < sequence.spec.priority:
        return None  # others may come before it yet
    is_here = shard is best.plan.shard
    common = _common(leader, sequence)
    if sequence.needs_prompt_logprobs:
        # The token behind the prefix needs a known logprob.
        common = common - 1 if sequence.can_share_prompt_logprobs(leader.sequence) else 0
    is_there_already = common <= leader.computed and leader.is_running and is_here
    if common < (best.cached if is_here else 0) + _LEAST_PREFIX_TO_WAIT_FOR or is_there_already:
        return None
    now_s = _cost_s(openings, best.plan.shard, sequence, best.cached)
    leader_s = openings.token_s(shard) * max(0, common - leader.computed)
    later_s = leader_s + _cost_s(openings, shard, sequence, common)
    if is_here:
        return min(now_s, later_s)
    return later_s if later_s < now_s else None


def _waits_for_holder(openings: Openings, sequence: Sequence, best: Place) -> bool:
    """Let ``sequence`` wait for a busy shard that has more of it than ``best``, if that costs less. Return whether."""
    uncached = sequence.known_tokens - best.cached
    if uncached < _LEAST_PREFIX_TO_WAIT_FOR or not openings.is_patient(sequence):
        return False
    # What is computed needlessly also delays all other requests that wait.
    weight = openings.computing_weight
    here = best.plan.shard
    now_s = weight * openings.token_s(here) * uncached + openings.sharing_s(here)
    later_s, target = now_s, None
    for waiting_s, shard in openings.busy_holders(sequence):
        if waiting_s >= later_s:
            break
        if not shard.could_hold_now(sequence):
            continue
        missing = sequence.known_tokens - shard.match(sequence).length
        cost_s = waiting_s + weight * openings.token_s(shard) * missing
        if cost_s < later_s:
            later_s, target = cost_s, shard
    if target is None:
        return False
    openings.note_waits_for(sequence, target, now_s - later_s + openings.wait_s(target))
    return True


def _common(leader: Resident, sequence: Sequence) -> int:
    """Return how many first tokens both have in common, without the last of ``sequence``. Compared once a pair."""
    other = leader.sequence
    if other.request.prefix_namespace != sequence.request.prefix_namespace:
        return 0
    found = sequence.common.get(other.request_id)
    if found is None:
        theirs, own = other.tokens(0, leader.target), sequence.tokens(0, sequence.most_shared)
        # Mostly as much as with the request before: a prompt that several have in common.
        guess = next(reversed(sequence.common.values()), 0)
        is_right = guess < min(len(theirs), len(own)) and theirs[guess] != own[guess] and theirs[:guess] == own[:guess]
        found = sequence.common[other.request_id] = guess if is_right else common_length(theirs, own)
    return found
