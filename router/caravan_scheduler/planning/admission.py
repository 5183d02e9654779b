"""Which waiting requests start in one plan: it asks for the first in order, and stops where asking costs too much."""

import math
from collections.abc import Callable

from caravan_scheduler.actions import Encode
from caravan_scheduler.fault import FaultError, on_behalf
from caravan_scheduler.planning.moving import begin_fetch
from caravan_scheduler.planning.placement import BusyHolder, EmptierShard, NoRoom, Place, choose
from caravan_scheduler.planning.prompts_under_way import AwaitedPrompt
from caravan_scheduler.planning.shard_index import ShardIndex
from caravan_scheduler.planning.step_plan import StepPlan
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import worth_copying
from caravan_scheduler.state import SchedulerState
from caravan_scheduler.waiting.queue import MOST_READ, NotNow

# A shard is given no more media once so many wait there: what it has encoded too early, it may drop before it is used.
_MOST_WAITING = 4
# A plan looks for places for at most this many requests. Those after them start in a later plan.
_MOST_ASKED = 64


def begin_encoding(state: SchedulerState, sequence: Sequence, shard: ShardAccount, cached: int) -> bool:
    """Let ``shard`` encode what ``sequence`` needs behind ``cached`` tokens. Return whether ``sequence`` must wait."""
    media = sequence.spec.media
    if media is None:
        return False
    missing = shard.media.missing(media.behind(cached))
    if not missing:
        return False
    under_way = {one.media_id: one.encode_id for one in state.encodings.under_way(shard.name)}
    new = [media_id for media_id in missing if media_id not in under_way]
    if new and len(under_way) >= _MOST_WAITING:
        return True
    for media_id in new:
        encoding = state.encodings.begin(shard.name, media_id, missing[media_id])
        under_way[media_id] = encoding.encode_id
        state.outbox.add(Encode(encoding.encode_id, shard.name, media.contents[media_id]))
    state.encodings.let_wait(sequence.request_id, [under_way[media_id] for media_id in missing])
    return True


class StepPlans(dict[ShardLedger, StepPlan]):
    """The step plans of one call, by shard that can take a command. Each is made when it is first looked up."""

    def __init__(self, make: Callable[[ShardLedger], StepPlan]) -> None:
        self._make = make

    def __missing__(self, shard: ShardLedger) -> StepPlan:
        plan = self[shard] = self._make(shard)
        return plan


class Admission:
    """Finds places for waiting requests, and starts them. It remembers who has none: room only shrinks in a plan."""

    def __init__(self, state: SchedulerState, index: ShardIndex, plans: StepPlans) -> None:
        self._state = state
        self._index = index
        self.plans = plans
        # By request id.
        self._answers: dict[int, NotNow] = {}
        self._asked = 0
        # The highest priority of a request that has no room.
        self._blocked = -math.inf
        # Shards that had no cells for a request, and shards that could take one that waits for something else.
        self._without_cells: set[ShardLedger] = set()
        self._with_room: set[ShardLedger | None] = set()
        # Requests that began to wait for a busy shard.
        self._deferred: list[Sequence] = []

    @on_behalf(1)
    def place_for(self, sequence: Sequence) -> Place | NotNow:
        """Return where ``sequence`` can start now, or why it cannot."""
        index, request_id = self._index, sequence.request.request_id
        if not index.open.by_name:
            return NotNow.NOBODY
        if (known := self._answers.get(request_id)) is not None:
            return known
        if self._asked >= _MOST_ASKED or len(self._answers) >= MOST_READ:
            return NotNow.NOBODY
        if sequence.spec.priority < self._blocked:
            # Else what was preempted for a higher priority would take its place back.
            place: Place | NotNow = NotNow.NO_ROOM
        elif (
            index.awaits_prefix(request_id)
            or self._state.transfers.is_awaited_by(request_id)
            or self._state.encodings.are_awaited_by(request_id)
        ):
            place = NotNow.PREFIX_COMING
        else:
            self._asked += 1
            if sequence.needs_prompt_logprobs:
                self._state.known_logprobs.share_with(sequence)
            place = self._look_up(sequence)
            if isinstance(place, Place) and (
                begin_fetch(self._state, sequence, place) or self.waits_for_media(sequence, place)
            ):
                place = NotNow.PREFIX_COMING
        if isinstance(place, NotNow):
            self._answers[request_id] = place
            if place is not NotNow.PREFIX_COMING:
                self._blocked = max(self._blocked, sequence.spec.priority)
        return place

    def _look_up(self, sequence: Sequence) -> Place | NotNow:
        """Do as `choose` does. Raises FaultError, which is contained: the next plan looks for all places anew."""
        try:
            return self.choose(sequence)
        except FaultError as fault:
            is_own = sequence.request_id in fault.request_ids
            raise FaultError(fault.error, fault.request_ids, is_contained=is_own) from fault.error

    @on_behalf(1)
    def choose(self, sequence: Sequence) -> Place | NotNow:
        """Return where ``sequence`` starts. If it waits, note for what, so that nobody looks for it again."""
        index = self._index
        refusals = self._state.policy.refusals
        answer, with_room, without_cells = choose(index, self.plans, sequence)
        self._without_cells.update(without_cells)
        if isinstance(answer, Place):
            return answer
        self._with_room.add(with_room)
        match answer:
            case NoRoom():
                refused = index.open.refused
                if self._state.policy.refusals > refusals:
                    refused[sequence.request_id] = NotNow.HELD
                elif without_cells:
                    refused[sequence.request_id] = NotNow.NO_ROOM
                # Else no shard was asked that has changed since.
                return refused.setdefault(sequence.request_id, NotNow.NO_ROOM)
            case EmptierShard(shard):
                index.speeds.expected[shard.name] += 1
                return NotNow.NO_ROOM
            case BusyHolder(shard, until_s):
                sequence.prefix_awaited_until_s = until_s
                index.queues.push(shard.name, sequence, until_s)
                self._deferred.append(sequence)
            case AwaitedPrompt():
                if answer.until_s < math.inf:
                    sequence.prefix_awaited_until_s = answer.until_s
                index.prompts.awaited[sequence.request_id] = answer
        return NotNow.PREFIX_COMING

    def waits_for_media(self, sequence: Sequence, place: Place) -> bool:
        """Whether media that ``sequence`` needs in ``place`` must be encoded first, which is begun then."""
        if sequence.spec.media is None:
            return False
        cached = place.saved.length or worth_copying(place.shard, place.match).length
        return begin_encoding(self._state, sequence, place.shard, cached)

    @on_behalf(1)
    def start(self, sequence: Sequence, place: Place) -> None:
        """Start ``sequence``, which has left the queue, in ``place``."""
        plan = self.plans[place.shard]
        if place.saved.length:
            resident = plan.load(sequence, place.match, place.saved)
        else:
            resident = plan.admit(sequence, place.match)
        self._state.stay(sequence, plan.shard, resident)
        sequence.prefix_awaited_until_s = None
        self._index.note_started(sequence, plan.shard, is_full=plan.is_full)

    def end(self, *, all_asked: bool) -> None:
        """Leave requests that wait for a busy shard out of the queue's order.

        ``all_asked``: shards that had no cells for a request, and room for none, need not be asked again.
        """
        for sequence in self._deferred:
            self._state.waiting.defer(sequence)
        if all_asked:
            found = self._without_cells - self._with_room
            self._index.open.without_cells.update(shard.name for shard in found if shard.stays.residents)
