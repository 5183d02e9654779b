"""What a plan looks up of shards: brought up to date by each shard that changes, so that no plan asks them all."""

import bisect
import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from caravan_scheduler.config import Clock
from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.prompts_under_way import PrefixIndex, PromptsUnderWay
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.ledger import ShardLedger

if TYPE_CHECKING:
    from caravan_scheduler.waiting.queue import NotNow

# The cost of sharing a shard with one more sequence, in prompt tokens that could be computed in that time.
_TOKENS_PER_RESIDENT = 64
# How far what is known of a shard's speed follows each look at it: a disturbed step must not turn requests away.
_NEWEST_SPEED = 0.05
# A second of waiting for an emptier shard counts so much: it is certain, while the residents of a fuller one may end.
_WAIT_WEIGHT = 4.0
# Most shards whose step ends soon that are considered.
_MOST_SOON_FREE = 4
# The seconds of a prompt token before any was measured.
_FIRST_TOKEN_S = 1e-3
# Most busy shards that are compared for a request: those with most of it in cells, and those that have saved of it.
_MOST_HOLDERS = 3
_MOST_SAVED_HOLDERS = 8


class ShardQueues:
    """A queue for each shard. Nobody looks for a place for its requests until they are taken out.

    Requests that were cancelled meanwhile stay in their queue until then.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[int, Sequence]] = {}
        # When each stops waiting, its id, and the shard.
        self._until: list[tuple[float, int, str]] = []

    def push(self, shard: str, sequence: Sequence, until_s: float) -> None:
        """Let ``sequence`` wait for ``shard`` until ``until_s``."""
        self._queues.setdefault(shard, {})[sequence.request_id] = sequence
        heapq.heappush(self._until, (until_s, sequence.request_id, shard))

    def length(self, shard: str) -> int:
        """Return how many wait for ``shard``."""
        return len(self._queues.get(shard, ()))

    def shard_of(self, request_id: int) -> str | None:
        """Return the shard for which a request waits; None if it waits for none."""
        return next((shard for shard, queue in self._queues.items() if request_id in queue), None)

    def pop(self, shard: str, count: int | None = None) -> list[Sequence]:
        """Take out the first ``count`` that wait for ``shard``, by priority, then by arrival; None: all."""
        queue = self._queues.get(shard, {})
        found = sorted(queue.values(), key=lambda one: (-one.spec.priority, one.request_id))[:count]
        for sequence in found:
            del queue[sequence.request_id]
        return found

    def pop_late(self, now: float) -> Iterator[Sequence]:
        """Take out those whose time is over."""
        while self._until and self._until[0][0] <= now:
            _, request_id, shard = heapq.heappop(self._until)
            sequence = self._queues.get(shard, {}).pop(request_id, None)
            if sequence is not None:
                yield sequence

    def pop_all(self) -> list[Sequence]:
        """Take out all."""
        found = [sequence for queue in self._queues.values() for sequence in queue.values()]
        self._queues.clear()
        self._until.clear()
        return found


class OpenShards:
    """A shard is *open* if it can take a command and has a sequence id; ``by_name`` has those.

    One that had no cells for requests is among ``without_cells`` until it changes. It has residents, so it does change.
    Until then it is asked for new requests only, not for the ``refused``, for which no shard had room, by id.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, ShardLedger] = {}
        self.without_cells: set[str] = set()
        self.refused: dict[int, NotNow] = {}
        # Shards that changed so that a request may start there, by whether they can take a command.
        self.due: set[str] = set()
        self._due_later: set[str] = set()
        self.with_two_layouts: set[str] = set()

    def update(self, shard: ShardLedger, *, may_start: bool) -> None:
        """Look at ``shard``, which changed. ``may_start``: maybe a request can start there by that."""
        name, can_command = shard.name, shard.commands.can_begin
        if may_start:
            self._due_later.add(name)
            self.without_cells.discard(name)
        if can_command and name in self._due_later:
            self._due_later.remove(name)
            self.due.add(name)
        if can_command and shard.stays.free_sequences > 0:
            self.by_name[name] = shard
        else:
            self.by_name.pop(name, None)
        if shard.capacity.limits.other_layout is None:
            self.with_two_layouts.discard(name)
        else:
            self.with_two_layouts.add(name)

    def forget(self, shard: str) -> None:
        """Forget ``shard``, which is gone."""
        self.by_name.pop(shard, None)
        for names in (self.due, self._due_later, self.without_cells, self.with_two_layouts):
            names.discard(shard)

    def to_ask(self, sequence: Sequence) -> Iterable[ShardLedger]:
        """Return the shards that are to be asked whether ``sequence`` can start."""
        if self.without_cells and sequence.request_id in self.refused:
            return [shard for name, shard in self.by_name.items() if name not in self.without_cells]
        return self.by_name.values()


class Speeds:
    """The speeds of shards, and when their steps end."""

    def __init__(self, clock: Clock, lengths: OutputLengths, prompts: PromptsUnderWay, queues: ShardQueues) -> None:
        self._clock = clock
        self._lengths = lengths
        self._prompts = prompts
        self._queues = queues
        # Measured seconds of a prompt token, by shard.
        self._token_s: dict[str, float] = {}
        # Shards that can take a request after the step under way: the weighted time at which that ends plus the cost of
        # sharing them, in seconds, and their names; ascending. The same by name.
        self._soon_free: list[tuple[float, str, ShardLedger]] = []
        self._soon_costs: dict[str, float] = {}
        # How many requests of this plan wait for a shard whose step ends soon, by its name.
        self.expected: Counter[str] = Counter()

    def update(self, shard: ShardLedger, *, soon_free: bool) -> None:
        """Measure ``shard``, which changed. ``soon_free``: it can take a request after the step under way."""
        self._forget_soon_free(shard.name)
        if (token_s := shard.costs.prompt_token_s) > 0:
            known_s = self.token_s(shard) if self._token_s else token_s
            self._token_s[shard.name] = known_s + _NEWEST_SPEED * (token_s - known_s)
        if soon_free:
            cost_s = self._soon_costs[shard.name] = _WAIT_WEIGHT * shard.commands.busy_until_s + self.sharing_s(shard)
            bisect.insort(self._soon_free, (cost_s, shard.name, shard))

    def forget(self, shard: str) -> None:
        """Forget ``shard``, which is gone."""
        self._token_s.pop(shard, None)
        self._forget_soon_free(shard)

    def _forget_soon_free(self, shard: str) -> None:
        if (cost_s := self._soon_costs.pop(shard, None)) is not None:
            del self._soon_free[bisect.bisect_left(self._soon_free, (cost_s, shard))]

    def token_s(self, shard: ShardAccount) -> float:
        """Return the measured seconds of a prompt token. A shard that has computed none is taken for the fastest."""
        return self._token_s.get(shard.name) or min(self._token_s.values(), default=_FIRST_TOKEN_S)

    def sharing_s(self, shard: ShardAccount, more: int = 0) -> float:
        """Return what sharing ``shard`` with its residents, and ``more`` sequences, costs a request.

        Bulk work costs nothing: it pauses.
        """
        sharers = len(shard.stays.residents) - shard.stays.bulk
        return self.token_s(shard) * _TOKENS_PER_RESIDENT * (sharers + more)

    def start_s(self, shard: ShardAccount, tokens: int) -> float:
        """Return what starting on ``shard`` costs a request, of which ``tokens`` have to be computed there."""
        return self.token_s(shard) * tokens + self.sharing_s(shard)

    def soon_better(self, than: ShardAccount) -> ShardLedger | None:
        """Return a shard whose step ends so soon, and that is so much emptier than ``than``, that it costs less.

        Requests that wait for it already count as its residents. On ``than``, prompts are to be computed first.
        """
        limit_s = self.sharing_s(than) + self.token_s(than) * self._prompts.pending_tokens(than.name)
        for _, name, shard in self._soon_free[:_MOST_SOON_FREE]:
            if _WAIT_WEIGHT * self._step_left_s(shard) + self.sharing_s(shard, self.expected.get(name, 0)) < limit_s:
                return shard
        return None

    def wait_s(self, shard: ShardAccount) -> float:
        """Return in how many seconds ``shard``, which is busy or full, can start one more; infinite if unknown."""
        if shard.drain.has_begun:
            return math.inf
        step_s, ahead = self._step_left_s(shard), self._queues.length(shard.name) - shard.stays.free_sequences
        if ahead < 0:
            return step_s
        slot_s = self._lengths.mean * shard.costs.mean_step_s / max(1, len(shard.stays.residents))
        return max(step_s, slot_s * (ahead + 1)) if slot_s > 0 else math.inf

    def _step_left_s(self, shard: ShardAccount) -> float:
        """Return how many more seconds the step of ``shard`` takes; 0 if none is under way."""
        now_s, end_s = self._clock.now_s, shard.commands.busy_until_s
        if not math.isfinite(end_s):
            return 0.0
        # A step that is late is expected to take as long again as it is late already.
        return end_s - now_s if now_s < end_s else now_s - end_s


class ShardIndex:
    """The shards by what a plan asks of them. ``waiting_per_shard``: requests that wait as the plan begins."""

    def __init__(self, shards: Mapping[str, ShardLedger], clock: Clock, lengths: OutputLengths) -> None:
        self._shards = shards
        self._known: dict[str, ShardLedger] = {}
        # Those of them that save cells.
        self._saving: dict[str, ShardLedger] = {}
        # The least cost of sharing an open shard; None if that is to be looked up.
        self._least_sharing_s: float | None = None
        self.clock = clock
        self.open = OpenShards()
        self.prefixes = PrefixIndex[str]()
        self.prompts = PromptsUnderWay()
        self.queues = ShardQueues()
        self.speeds = Speeds(clock, lengths, self.prompts, self.queues)
        self.waiting_per_shard = 0.0

    def update(self, name: str, *, may_start: bool) -> None:
        """Look at the shard ``name`` again, which changed. ``may_start``: maybe a request can start there by that."""
        shard = self._shards.get(name)
        self._least_sharing_s = None
        if self._known.get(name) is not shard:  # it is gone, or it is another of the same name
            self._known.pop(name, None)
            self._saving.pop(name, None)
            for part in (self.open, self.prefixes, self.prompts, self.speeds):
                part.forget(name)
        if shard is None:
            return
        self._known[name] = shard
        if shard.saves.are_possible:
            self._saving[name] = shard
        prompts = [] if shard.drain.has_begun else shard.stays.prefilling
        self.open.update(shard, may_start=may_start)
        self.prompts.replace(shard, prompts)
        self.speeds.update(
            shard, soon_free=bool(prompts) and shard.stays.free_sequences > 0 and shard.commands.completes_prefill
        )
        for change in shard.stays.take_prefix_changes():
            note = self.prefixes.add if change.is_new else self.prefixes.remove
            note(name, change.prefix_hashes)

    def begin_plan(self, *, waiting: int, anew: bool) -> None:
        """Begin to look for places for ``waiting`` requests. ``anew``: what was found before does not count."""
        self.waiting_per_shard = waiting / max(1, len(self._shards))
        self.open.due.clear()
        self.speeds.expected.clear()
        if anew:
            self.open.without_cells.clear()
            self.open.refused.clear()
            self.prompts.awaited.clear()

    def note_started(self, sequence: Sequence, shard: ShardAccount, *, is_full: bool) -> None:
        """Note that ``sequence`` starts on ``shard``. ``is_full``: the next step takes no more requests."""
        self.open.refused.pop(sequence.request_id, None)
        self.prompts.awaited.pop(sequence.request_id, None)
        self.update(shard.name, may_start=False)
        if is_full:
            self.open.by_name.pop(shard.name, None)

    def busy_holders(self, sequence: Sequence) -> list[tuple[float, str, ShardLedger]]:
        """Return shards that have some of ``sequence`` and cannot take it now, after what waiting and sharing cost.

        These are seconds, and the cheapest come first.
        """
        names = self.prefixes.holders(sequence.prompt_hashes)
        saved = [
            name
            for name, shard in self._saving.items()
            if name not in names
            and name not in self.open.by_name
            and shard.runs.has_beginning(sequence.keys, sequence.known_tokens)
        ]
        found = self._cheapest(names, _MOST_HOLDERS)
        return sorted(found + self._cheapest(saved, _MOST_SAVED_HOLDERS)) if saved else found

    def _cheapest(self, names: Iterable[str], most: int) -> list[tuple[float, str, ShardLedger]]:
        busy = [self._known[name] for name in names if name not in self.open.by_name]
        found = [(self.speeds.wait_s(shard) + self.speeds.sharing_s(shard), shard.name, shard) for shard in busy]
        return sorted(found)[:most]

    def awaits_prefix(self, request_id: int) -> bool:
        """Whether a request waits for a prefix that is still being computed, and no cheaper shard is open."""
        awaited = self.prompts.awaited.get(request_id)
        if awaited is None or awaited.is_over(self.clock.now_s):
            return False
        if self._least_sharing_s is None:
            self._least_sharing_s = min(map(self.speeds.sharing_s, self.open.by_name.values()), default=0.0)
        return self._least_sharing_s >= awaited.sharing_s

    def pop_queued(self, changed: Iterable[str]) -> list[Sequence]:
        """Take out of the shards' queues whom their shard can take or who waited long. ``changed``: shards."""
        found = list(self.queues.pop_late(self.clock.now_s))
        for name in changed:
            if not self.queues.length(name):
                continue
            shard = self._shards.get(name)
            if shard is None or shard.drain.has_begun or not shard.stays.residents:
                found += self.queues.pop(name)
            elif name in self.open.by_name:
                found += self.queues.pop(name, shard.stays.free_sequences)
        return found
