"""The policy of the product: cells are kept while a return is worth more than what waits for them.

A parked sequence is worth what its job's next request saves by it: the time to compute it again, for all that run on the
shard, as likely and as soon as that request is expected. Keeping it costs a request that could use its cells a second
per second. So it is *held* against that request while all of this is so:

1. Its worth is at least that second per second.
2. It has been held, since its answer ended, for no longer than computing it again would cost. So a job that does not
   come back costs others at most what LRU costs them when it does: the ski rental problem, for which that is the best
   bound (Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).
3. The request is not ahead of the job: by priority, between keys, or by service. A job is ahead of others of its key
   by `CREDIT` times the tokens that it has in cells. So it is served before others by at most that much more than fair
   share gives it, and nothing starves.

The time for which it is held is charged to its session and its key, as if it had got a token in each step.
"""

from caravan_scheduler.jobs.policy import NOTHING_HELD, Held, PolicyInput
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.prefix_reuse import LOAD_S, copy_s
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.waiting.fair_share import OUTPUT_TOKEN

# A token in cells counts like so many tokens of service.
CREDIT = 4.0
# A rate of return is looked up again after this share of the time for which the job has been away.
_STALE_SHARE = 0.1
# What is held is looked at several times a second. If not, nobody waited for it.
_LONGEST_RENT_S = 1.0


class ExpectedReturn:
    """Keeps cells for jobs that come back."""

    def __init__(self, given: PolicyInput) -> None:
        self._clock = given.clock
        self._shares = given.shares
        self._waiting = given.waiting
        self._has_refused = False

    def in_order_of_eviction(self, shard: ShardAccount, parked: list[Resident]) -> list[Resident]:
        """Return ``parked`` by what they are worth for each of their cells."""
        if len(parked) < 2:
            return parked
        worth = {one: self._worth(shard, one) / max(1, self._own_cells(shard, one)) for one in parked}
        return sorted(parked, key=worth.__getitem__)

    def held(self, shard: ShardAccount, sequence: Sequence) -> Held:
        """Return what ``sequence`` may not take of ``shard``."""
        parked = shard.stays.parked.values()
        held = [one for one in parked if self._is_held(shard, one, sequence)]
        if not held:
            return NOTHING_HELD
        self._has_refused = True
        for one in held:
            self._pay(shard, one)
        ids = frozenset(one.sequence_id for one in held)
        others = [one.sequence_id for one in parked if one.sequence_id not in ids]
        cells = shard.cells.held - shard.cells.live - shard.cells.tree.own_cells(others)
        if sequence.kept is None:  # one that goes on gives its own cells back soonest if it need not wait
            cells += sum(round(one.sequence.job.growth) for one in held if one.sequence.job is not None)
        return Held(cells, ids)

    def charged(self, sequence: Sequence) -> float:
        """Return what the session of ``sequence`` was charged, less the credit for what it has in cells."""
        source = sequence.kept
        return sequence.account.counter - (0 if source is None else CREDIT * source.computed)

    def take_refusals(self) -> bool:
        """Return whether anything was held against a request since the last call."""
        refused, self._has_refused = self._has_refused, False
        return refused

    def _is_held(self, shard: ShardAccount, resident: Resident, sequence: Sequence) -> bool:
        if resident.is_continued or sequence.started or sequence.continues is resident:
            return False
        if self._is_ahead(sequence, resident):
            return False
        if resident.is_awaited:
            return True
        return self._worth(shard, resident) >= 1.0 and resident.held_s <= self._saved_s(shard, resident)

    def _is_ahead(self, sequence: Sequence, resident: Resident) -> bool:
        """Whether ``sequence`` goes before the next request of the job of ``resident``."""
        spec, other = sequence.spec, resident.sequence.spec
        if spec.priority != other.priority:
            return spec.priority > other.priority
        if spec.tenant.name != other.tenant.name:
            return self._shares.tenants.counter(spec.tenant) < self._shares.tenants.counter(other.tenant)
        credit = CREDIT * resident.computed
        if spec.session != other.session:
            return self.charged(sequence) < self._shares.charged(other.tenant.name, other.session) - credit
        own, theirs = sequence.job, resident.sequence.job
        return own is not None and theirs is not None and own.service < theirs.service - credit

    def _worth(self, shard: ShardAccount, resident: Resident) -> float:
        """Return how many seconds are saved by each second for which ``resident`` is kept."""
        job, now_s = resident.sequence.job, self._clock.now_s
        if job is None or resident.is_continued:
            return 0.0
        looked_s, rate = resident.return_rate
        away_s = now_s - resident.last_used_s
        if now_s - looked_s > _STALE_SHARE * min(away_s, 1.0) or looked_s < resident.last_used_s:
            rate = job.return_rate(away_s)
            resident.return_rate = now_s, rate
        return rate * self._saved_s(shard, resident)

    def _saved_s(self, shard: ShardAccount, resident: Resident) -> float:
        """Return what computing or loading ``resident`` again costs all that run on ``shard``, in seconds."""
        cells, costs = resident.computed, shard.costs
        own = self._own_cells(shard, resident)
        seconds = costs.recompute_s(cells - own, cells)
        if shard.saves.are_possible:
            copies = 1 if resident.is_expendable else 2
            seconds = min(seconds, LOAD_S + copies * copy_s(shard, own))
        # While nothing runs, those that wait are delayed by holding no less than by computing.
        return seconds * (1 + len(shard.stays.residents) + self._waiting()) if shard.stays.residents else seconds

    def _own_cells(self, shard: ShardAccount, resident: Resident) -> int:
        """Return the cells that would be lost with ``resident``."""
        if not shard.layout.shares_cells:
            return resident.computed
        return shard.cells.tree.own_cells((resident.sequence_id,))

    def _pay(self, shard: ShardAccount, resident: Resident) -> None:
        """Charge for the time since ``resident`` was looked at, for which it was held."""
        now_s, spec = self._clock.now_s, resident.sequence.spec
        seconds = now_s - resident.rent_paid_s
        resident.rent_paid_s = now_s
        if 0 < seconds <= _LONGEST_RENT_S:
            resident.held_s += seconds
            if shard.costs.mean_step_s:
                self._shares.charge(spec.tenant, spec.session, OUTPUT_TOKEN * seconds / shard.costs.mean_step_s)
