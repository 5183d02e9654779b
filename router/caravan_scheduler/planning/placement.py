"""Which shard takes a request: decided when one can take it now, never before."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from caravan_scheduler.core.tokens import common_length
from caravan_scheduler.planning.prompts_under_way import AwaitedPrompt
from caravan_scheduler.planning.shard_index import ShardIndex
from caravan_scheduler.planning.step_plan import StepPlan
from caravan_scheduler.prefix_tree import NO_MATCH, Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import find_match, saved_prefix, shared_by_load
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedPrefix

# A request waits for prompts under way at most this many times as long as computing all of it would take.
_MOST_WAIT = 2.0
# A shorter prefix is computed again rather than waited for.
_LEAST_PREFIX_TO_WAIT_FOR = 16
# A second of computing that could be saved counts so much, since it delays residents, and more while others wait.
_LEAST_WEIGHT = 4.0
_MOST_WEIGHT = 8.0


class Place(NamedTuple):
    """A request starts on ``shard`` from the prefix that ``match`` found in the cache, or from ``saved`` runs.

    What is loaded of the ``saved`` prefix comes behind what ``match`` has of it. ``cached``: its first tokens that need
    not be computed. ``cost_s``: what starting there costs, in seconds.
    """

    shard: ShardLedger
    match: Match
    saved: SavedPrefix
    cached: int
    cost_s: float


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No shard can take the request."""


@dataclass(frozen=True, slots=True)
class EmptierShard:
    """The request waits for ``shard``, whose step ends soon."""

    shard: ShardLedger


@dataclass(frozen=True, slots=True)
class BusyHolder:
    """The request waits for ``shard``, which has its prefix and is busy or full, but not beyond ``until_s``."""

    shard: ShardLedger
    until_s: float


NotYet = NoRoom | EmptierShard | BusyHolder | AwaitedPrompt


class Choice(NamedTuple):
    """``answer``: where a request starts, or why not yet, although ``with_room`` could take it if that is not None.

    ``without_cells``: shards that had no cells for it.
    """

    answer: Place | NotYet
    with_room: ShardLedger | None = None
    without_cells: Collection[ShardLedger] = ()


def choose(index: ShardIndex, plans: Mapping[ShardLedger, StepPlan], sequence: Sequence) -> Choice:
    """Return where ``sequence`` starts soonest and disturbs least. ``plans``: the next steps of shards.

    Places cost seconds: what is not cached there has to be computed, and residents share the shard. It does not start
    now if waiting costs less: for a prompt under way that begins alike, for a busy shard that has its prefix, or for an
    emptier shard.
    """
    places = _places(index, sequence)
    if places and not any(place.cached for place in places) and not any(index.prompts.like(sequence)):
        # Nothing holds it here. If it waits for an emptier shard wherever it has room, no plan needs to be made.
        cheapest = places[0].shard
        if (emptier := index.speeds.soon_better(cheapest)) is not None:
            return Choice(EmptierShard(emptier), cheapest)
    best, without_cells = _cheapest(plans, places, sequence)
    if best is None:
        return Choice(NoRoom(), None, without_cells)
    return Choice(_wait_instead(index, sequence, best) or best, best.shard, without_cells)


def _places(index: ShardIndex, sequence: Sequence) -> list[Place]:
    """Return the places on open shards, the cheapest first, whether or not there is room."""
    holders = index.prefixes.may_hold(sequence.prompt_hashes)
    start_s, known = index.speeds.start_s, sequence.known_tokens
    places = []
    for shard in index.open.to_ask(sequence):
        match = find_match(shard, sequence) if holders is None or shard.name in holders else NO_MATCH
        saved = saved_prefix(shard, sequence, match) if shard.saves.are_possible else NO_PREFIX
        if saved.length:
            match = shared_by_load(shard, sequence, match, saved)
        cached = max(match.length, saved.length)
        cost_s = start_s(shard, known - cached)
        if sequence.spec.media is not None:
            cost_s += shard.media.encode_s(sequence.spec.media.behind(cached))
        places.append(Place(shard, match, saved, cached, cost_s))
    return sorted(places, key=_cost) if len(places) > 1 else places


_cost = attrgetter("cost_s")


def _cheapest(
    plans: Mapping[ShardLedger, StepPlan], places: list[Place], sequence: Sequence
) -> tuple[Place | None, list[ShardLedger]]:
    """Return the first of ``places`` that has room, and the shards before it that have no cells for ``sequence``.

    Plans are made for the shards that come into question only. Of equal places, the one with most free cells is first.
    """
    without_cells: list[ShardLedger] = []
    for _, group in itertools.groupby(places, key=_cost):
        equals = list(group)
        if len(equals) > 1:
            equals.sort(key=lambda place: (-place.shard.cells.free, place.shard.name))
        for place in equals:
            plan = plans[place.shard]
            if (plan.can_load if place.saved.length else plan.can_admit)(sequence, place.match):
                return place, without_cells
            if plan.is_open and plan.adapter == sequence.spec.adapter:
                without_cells.append(place.shard)
    return None, without_cells


def _wait_instead(index: ShardIndex, sequence: Sequence, best: Place) -> NotYet | None:
    """Return what ``sequence`` waits for rather than start in ``best``; None if nothing."""
    here = best.shard
    # Without a limit it might wait for one prefix after another.
    may_wait = sequence.prefix_awaited_until_s is None or index.clock.now_s < sequence.prefix_awaited_until_s
    if may_wait and (prompt := _prompt_that_begins_alike(index, sequence, best)) is not None:
        return prompt
    if sequence.lost_a_shard:
        # Those whose last step lost a shard are computed one at a time, so that another loss tells which it was.
        for other in here.stays.prefilling:
            if other.sequence.lost_a_shard:
                return AwaitedPrompt(other, other.target, index.speeds.sharing_s(here))
    if may_wait and (holder := _busy_holder(index, sequence, best)) is not None:
        return holder
    if best.cached == 0 and (emptier := index.speeds.soon_better(here)) is not None:
        return EmptierShard(emptier)
    return None


def _until_s(index: ShardIndex, sequence: Sequence, most_s: float) -> float:
    """Return until when ``sequence`` waits for its prefix: at most ``most_s`` after it first began to wait."""
    known_s = sequence.prefix_awaited_until_s
    return index.clock.now_s + most_s if known_s is None else known_s


def _prompt_that_begins_alike(index: ShardIndex, sequence: Sequence, best: Place) -> AwaitedPrompt | None:
    """Return a prompt that costs less to wait for than ``sequence`` would cost in ``best``."""
    here, speeds = best.shard, index.speeds
    for leader, shard in index.prompts.like(sequence):
        cost_s = _cost_of_waiting(index, leader, shard, sequence, best)
        if cost_s is not None:
            until_s = _until_s(index, sequence, _MOST_WAIT * speeds.start_s(here, sequence.known_tokens))
            sharing_s = cost_s - speeds.token_s(here) * sequence.known_tokens
            length = _provided(leader, shard, sequence)
            if shard.layout.whole_only:
                length += 1  # the state is saved before the next token is computed
            return AwaitedPrompt(leader, length, sharing_s, until_s)
    return None


def _cost_of_waiting(
    index: ShardIndex, leader: Resident, shard: ShardLedger, sequence: Sequence, best: Place
) -> float | None:
    """Return what starting costs, in seconds, once the prompt of ``leader`` on ``shard`` is there.

    None if that prompt provides no more than ``best`` has, or if starting in ``best`` costs less.
    """
    if leader.priority < sequence.spec.priority:
        return None  # others may come before a prompt of lower priority yet
    is_here = shard is best.shard
    common = _provided(leader, shard, sequence)
    if sequence.needs_prompt_logprobs:
        # The token behind the prefix needs a known logprob.
        common = common - 1 if sequence.can_share_prompt_logprobs(leader.sequence) else 0
    is_there_already = common <= leader.computed and leader.is_running and is_here
    # What is loaded takes cells, unlike what others hold already.
    shares_cells = shard.layout.shares_cells and not shard.layout.whole_only
    known = (best.match.length if shares_cells else best.cached) if is_here else 0
    if common < known + _LEAST_PREFIX_TO_WAIT_FOR or is_there_already:
        return None
    speeds = index.speeds
    leader_s = speeds.token_s(shard) * max(0, common - leader.computed)
    later_s = leader_s + speeds.start_s(shard, sequence.known_tokens - common)
    if is_here and not shard.layout.whole_only:
        return min(best.cost_s, later_s)
    return later_s if later_s < best.cost_s else None


def _busy_holder(index: ShardIndex, sequence: Sequence, best: Place) -> BusyHolder | None:
    """Return a busy shard that has more of ``sequence`` than ``best``, if waiting for it costs less than computing."""
    uncached = sequence.known_tokens - best.cached
    if uncached < _LEAST_PREFIX_TO_WAIT_FOR:
        return None
    # What is computed needlessly also delays all other requests that wait.
    weight = min(_MOST_WEIGHT, _LEAST_WEIGHT + index.waiting_per_shard)
    here, speeds = best.shard, index.speeds
    now_s = weight * speeds.token_s(here) * uncached + speeds.sharing_s(here)
    if sequence.spec.media is not None:
        now_s += here.media.encode_s(sequence.spec.media.behind(best.cached))
    later_s = now_s
    holder = None
    for waiting_s, _, shard in index.busy_holders(sequence):
        if waiting_s >= later_s:
            break
        if not shard.capacity.could_hold_now(sequence):
            continue
        match = find_match(shard, sequence)
        missing = sequence.known_tokens - max(match.length, saved_prefix(shard, sequence, match).length)
        cost_s = waiting_s + weight * speeds.token_s(shard) * missing
        if cost_s < later_s:
            later_s, holder = cost_s, shard
    if holder is None:
        return None
    return BusyHolder(holder, _until_s(index, sequence, now_s - later_s + index.speeds.wait_s(holder)))


def _provided(leader: Resident, shard: ShardLedger, sequence: Sequence) -> int:
    """Return how many first tokens ``sequence`` can have from the prompt of ``leader``, where that is computed."""
    common = _common(leader, sequence)
    if not shard.layout.whole_only:
        return common
    return next((place for place in shard.checkpoints.ahead(leader) if place <= common), 0)


def _common(leader: Resident, sequence: Sequence) -> int:
    """Return how many first tokens both have in common, without the last of ``sequence``. Compared once a pair."""
    other = leader.sequence
    found = sequence.common.get(other.request_id)
    if found is None:
        found = 0
        if other.request.prefix_namespace == sequence.request.prefix_namespace:
            theirs, own = other.tokens(0, leader.target), sequence.tokens(0, sequence.known_tokens)
            equal = common_length(theirs, own, sequence.hashed_in_common(other))
            found = sequence.border(min(equal, sequence.most_shared))
        sequence.common[other.request_id] = found
    return found
