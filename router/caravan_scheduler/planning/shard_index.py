"""What a plan looks up of shards: brought up to date by each shard that changes, so that no plan asks them all."""

from collections.abc import Iterable, Mapping

from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.planning.open_shards import OpenShards
from caravan_scheduler.planning.prefix_index import PrefixIndex
from caravan_scheduler.planning.prompts_under_way import PromptsUnderWay
from caravan_scheduler.planning.shard_queues import ShardQueues
from caravan_scheduler.planning.speeds import Speeds
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.clock import Clock
from caravan_scheduler.shard.ledger import ShardLedger

# Most busy shards that are compared for a request.
_MOST_HOLDERS = 3


class ShardIndex:
    """The shards by what a plan asks of them. ``waiting_per_shard``: requests that wait as the plan begins."""

    def __init__(self, shards: Mapping[str, ShardLedger], clock: Clock, lengths: OutputLengths) -> None:
        self._shards = shards
        self._known: dict[str, ShardLedger] = {}
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
            for part in (self.open, self.prefixes, self.prompts, self.speeds):
                part.forget(name)
        if shard is None:
            return
        self._known[name] = shard
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
            for found in (self.open.without_cells, self.open.refused, self.prompts.awaited):
                found.clear()

    def note_started(self, sequence: Sequence, shard: ShardAccount, *, is_full: bool) -> None:
        """Note that ``sequence`` starts on ``shard``. ``is_full``: the next step takes no more requests."""
        self.open.refused.discard(sequence.request_id)
        self.prompts.awaited.pop(sequence.request_id, None)
        self.update(shard.name, may_start=False)
        if is_full:
            self.open.by_name.pop(shard.name, None)

    def busy_holders(self, sequence: Sequence) -> list[tuple[float, ShardLedger]]:
        """Return shards that have much of ``sequence`` and cannot take it now, with what waiting and sharing cost.

        These are seconds, and the cheapest come first.
        """
        names = self.prefixes.holders(sequence.prompt_hashes)
        busy = [self._known[name] for name in names if name not in self.open.by_name]
        found = [(self.speeds.wait_s(shard) + self.speeds.sharing_s(shard), shard.name, shard) for shard in busy]
        return [(cost_s, shard) for cost_s, _, shard in sorted(found)[:_MOST_HOLDERS]]

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
