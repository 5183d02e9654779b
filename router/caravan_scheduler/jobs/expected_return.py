"""The policy of the product: cells are kept while a return is worth more than what waits for them.

A parked sequence is worth what its job's next request saves by it: the time to compute it again, for all that run on
the shard, times the rate at which that request is expected (`Gaps.return_rate`). A request that waits loses a second
per second, and may take the cells that are worth least, up to a price. All others are *held* against it. A request that
goes on from cells may take those of shorter sequences, whatever these are worth: otherwise two jobs that do not fit
beside each other would cut each other back in turn, and compute again what they lost each time.

A job starts only if it and all that are held or run have room for their next turns, and goes on only if longer ones
have room for one. So few jobs run and seldom wait, rather than many that take each other's cells: the working
set (Denning, "The working set model for program behavior", 1968). A request leaves no room if its key has no jobs, or
if it is so short that its cells would not be held: it makes way, and soon has them again.

Nothing is held against a request, nor room left by it, if

1. it is ahead of the job: by priority, between keys, or by service. A job is ahead of others of its key by
   `CREDIT` times the tokens that it has in cells. So it is served before others by at most that much more than fair
   share gives it, and nothing starves;
2. the job has held cells, since its answer ended, for as long as computing them again costs. So a job that does not
   come back costs others at most what LRU costs them when it does: the ski rental problem, for which that is the best
   bound (Karlin et al., "Competitive snoopy caching", Algorithmica 3, 1988).

Where cells cannot be saved, those that a client asked to keep for some time (`lifetimes`) are held like that until
then, whatever they are worth: in at most half of the cells and ids of a shard, against requests that could start beside
them once others have ended. A running request takes them after all others.

The time for which cells are held is charged to their session and key, as if they had got a token in each step.
"""

from collections.abc import Collection
from typing import NamedTuple
from weakref import WeakKeyDictionary

from caravan_scheduler.gaps import EDGES_S
from caravan_scheduler.job import Job, ParkedSequence
from caravan_scheduler.jobs.policy import PolicyInput
from caravan_scheduler.lifetimes import Kept, within_shares
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.policy import NOTHING_HELD, Held
from caravan_scheduler.shard.prefix_reuse import LOAD_S, copy_s
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.waiting.fair_share import OUTPUT_TOKEN

# A token in cells counts like so many tokens of service.
CREDIT = 4.0
# Steps are short, and the layout has room for the cells of a job, while it is expected back at such a rate, in 1/s.
_SOON_RATE = 0.02
# What a second of waiting is worth, and that of a request that takes cells for one answer only.
_PRICE = 1.0
_PASSING_PRICE = 2.0
# Computing again delays all that run on the shard, but no more than so many are counted.
_MOST_DELAYED = 8
# A job starts if it and those that are there have room for so many more turns, and goes on if longer ones have this.
_TURNS_AHEAD = 15
_TURN_BESIDE = 1.0
# Lifetimes hold so much of the cells and ids of a shard.
_ALIVE_SHARE = 0.5
# A rate of return is looked up again after this share of the time for which the job has been away.
_STALE_SHARE = 0.1
# What is held is looked at several times a second. If not, nobody waited for it.
_LONGEST_RENT_S = 1.0


class _Value(NamedTuple):
    """A parked sequence: what keeping a cell of it is worth, in seconds per second, and how many are its ``own``.

    ``is_kept``: whether it is worth being held against others. ``is_alive``: whether a lifetime holds it.
    """

    cell_worth: float
    own: int
    is_kept: bool
    is_alive: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """Those with less make way first."""
        return self.is_alive, self.cell_worth if self.is_kept else 0.0


class ExpectedReturn:
    """Keeps cells for jobs that come back."""

    def __init__(self, given: PolicyInput) -> None:
        self._clock = given.clock
        self._shares = given.shares
        # How often anything was held against a request; and how often until `take_refusals`.
        self.refusals = self._refusals_taken = 0
        # By shard, as long as that is there, with the time and what they depend on.
        self._known: WeakKeyDictionary[ShardAccount, tuple[tuple[float, int, int], dict[Resident, _Value]]] = (
            WeakKeyDictionary()
        )

    def in_order_of_eviction(self, shard: ShardAccount, parked: list[Resident]) -> list[Resident]:
        """Return ``parked`` by last use, then those worth being held, by what a cell is worth; lifetimes come last."""
        if len(parked) < 2:
            return parked
        values = self._values(shard)
        return sorted(parked, key=lambda one: values[one].rank)

    def held(self, shard: ShardAccount, sequence: Sequence) -> Held:
        """Return what ``sequence`` may not take of ``shard``."""
        values = self._values(shard)
        held, taken = self._too_dear(shard, sequence)
        growth = self._growth_ahead(shard, sequence, [one for one in held if values[one].is_kept])
        if not held and not growth:
            return NOTHING_HELD
        self.refusals += 1
        for one in held:
            self._pay(shard, one)
        ids = frozenset(one.sequence_id for one in held)
        others = [one.sequence_id for one in shard.stays.parked.values() if one.sequence_id not in ids]
        cells = shard.cells.held - shard.cells.live - shard.cells.tree.own_cells(others) - taken
        return Held(max(0, cells) + growth, ids)

    def _too_dear(self, shard: ShardAccount, sequence: Sequence) -> tuple[list[Resident], int]:
        """Return what ``sequence`` may not take all of, and how many cells of that it may take nevertheless."""
        values, alive = self._values(shard), self._alive_beside(shard, sequence)
        protected = [
            one
            for one, value in values.items()
            if (value.is_kept or one in alive) and not self._may_take(sequence, one)
        ]
        left, taken, held = (_PRICE if _comes_back(sequence) else _PASSING_PRICE), 0, []
        for one in sorted(protected, key=lambda one: values[one].cell_worth):
            value = values[one]
            if one in alive:
                held.append(one)
            elif _is_shorter(one, sequence.kept):
                continue
            elif value.cell_worth * value.own <= left:
                left -= value.cell_worth * value.own
            else:
                held.append(one)
                taken += int(left / value.cell_worth)
                left = 0.0
        return held, taken

    def _growth_ahead(self, shard: ShardAccount, sequence: Sequence, held: list[Resident]) -> int:
        """Return how many cells ``sequence`` leaves for the next turns of jobs, of those ``held`` and of running ones.

        If it goes on from cells, that is a turn of longer ones. If it ends for good, it has gone by then; and if it is
        short, it makes way for them.
        """
        job, source = sequence.job, sequence.kept
        if job is None or not _comes_back(sequence) or self._is_cheap(shard, sequence, job):
            return 0
        running = [
            one
            for one in shard.stays.residents.values()
            if not _is_shorter(one, source) and self._will_be_kept(shard, one) and not self._may_take(sequence, one)
        ]
        there = [one.sequence.job for one in (*held, *running)]
        if not there:
            return 0
        growth = sum(job.expected_growth for job in there if job is not None)
        return round(_TURN_BESIDE * growth if source is not None else _TURNS_AHEAD * (growth + job.expected_growth))

    def is_expected(self, resident: Resident) -> bool:
        """Whether a request that continues ``resident``, which is parked, is likely to come soon."""
        return self._rate(resident) >= _SOON_RATE

    def charged(self, sequence: Sequence) -> float:
        """Return what the session of ``sequence`` was charged, less the credit for what it has in cells."""
        source = sequence.kept
        return sequence.account.counter - (0 if source is None else CREDIT * source.computed)

    def take_refusals(self) -> bool:
        """Return whether anything was held against a request since the last call."""
        are_new = self.refusals > self._refusals_taken
        self._refusals_taken = self.refusals
        return are_new

    def _values(self, shard: ShardAccount) -> dict[Resident, _Value]:
        """Return what the parked sequences of ``shard`` are worth. Many requests ask for that at one time."""
        version = self._clock.now_s, shard.stays.version, shard.cells.tree.version
        known = self._known.get(shard)
        if known is None or known[0] != version:
            alive = self._alive(shard)
            values = {one: self._value(shard, one, is_alive=one in alive) for one in shard.stays.parked.values()}
            known = self._known[shard] = version, values
        return known[1]

    def _alive(self, shard: ShardAccount) -> Collection[Resident]:
        """Return the parked sequences that are held since their lifetimes last. Where they can be saved, none is."""
        if shard.saves.are_possible:
            return ()
        an_id = shard.capacity.cells // shard.capacity.limits.max_sequences
        asked = [
            (one, Kept(one.sequence.spec.tenant, max(an_id, one.computed - one.shared)))
            for one in reversed(list(shard.stays.parked.values()))
            if self._clock.now_s < one.last_used_s + one.sequence.spec.keep_s
        ]
        return set(within_shares(asked, int(_ALIVE_SHARE * shard.capacity.cells))) if asked else ()

    def _alive_beside(self, shard: ShardAccount, sequence: Sequence) -> Collection[Resident]:
        """Return those of them beside which ``sequence`` can start, sooner or later: none if nothing else runs."""
        alive = {one for one, value in self._values(shard).items() if value.is_alive}
        if not alive or not shard.stays.residents:
            return ()
        cells = shard.cells.tree.own_cells([one.sequence_id for one in alive]) if shard.layout.shares_cells else 0
        return alive if sequence.known_tokens + cells <= shard.capacity.cells else ()

    def _value(self, shard: ShardAccount, resident: Resident, *, is_alive: bool) -> _Value:
        own = resident.computed
        if shard.layout.shares_cells:
            own = shard.cells.tree.own_cells((resident.sequence_id,))
        rate = self._rate(resident)
        if not rate:
            return _Value(0.0, own, is_kept=False, is_alive=is_alive)
        saved_s = self._saved_s(shard, resident, range(resident.computed - own, resident.computed))
        is_kept = resident.is_awaited or (rate * saved_s >= _PRICE and resident.hold.held_s <= saved_s)
        return _Value(rate * saved_s / max(1, own), own, is_kept, is_alive)

    def _may_take(self, sequence: Sequence, resident: Resident) -> bool:
        return sequence.started or sequence.continues is resident or self._is_ahead(sequence, resident)

    def _is_ahead(self, sequence: Sequence, resident: Resident) -> bool:
        """Whether ``sequence`` goes before the next request of the job of ``resident``."""
        spec, other = sequence.spec, resident.sequence.spec
        if spec.priority != other.priority:
            return spec.priority > other.priority
        if spec.tenant.name != other.tenant.name:
            return self._shares.tenants.counter(spec.tenant) < self._shares.tenants.counter(other.tenant)
        credit = CREDIT * resident.computed
        if spec.session != other.session:
            # Of two requests that wait, the order of the queue decides.
            own_charge = self.charged(sequence) if resident.is_awaited else sequence.account.counter
            return own_charge < self._shares.charged(other.tenant.name, other.session) - credit
        own, theirs = sequence.job, resident.sequence.job
        return own is not None and theirs is not None and own.service < theirs.service - credit

    def _will_be_kept(self, shard: ShardAccount, resident: Resident) -> bool:
        """Whether ``resident``, which runs, is worth being held against others once it has ended."""
        job, hold = resident.sequence.job, resident.hold
        if job is None or not job.expected_growth:
            return False
        if hold.looked_s < 0:
            hold.return_rate, hold.looked_s = job.return_rate(0.0), self._clock.now_s
        cells = range(max(resident.computed, resident.target))
        return hold.return_rate * self._saved_s(shard, resident, cells) >= _PRICE

    def _rate(self, resident: Resident) -> float:
        """Return how soon the job of ``resident`` is expected back, in 1/s."""
        job, now_s = resident.sequence.job, self._clock.now_s
        if job is None or resident.is_continued:
            return 0.0
        if resident.is_awaited:
            return 1.0
        hold, away_s = resident.hold, now_s - resident.last_used_s
        if now_s - hold.looked_s > _STALE_SHARE * min(away_s, 1.0) or hold.looked_s < resident.last_used_s:
            hold.return_rate, hold.looked_s = job.return_rate(away_s), now_s
        return hold.return_rate

    def _is_cheap(self, shard: ShardAccount, sequence: Sequence, job: Job) -> bool:
        """Whether the cells of ``sequence`` would not be worth being held, even if they could not be saved."""
        seconds = self._of_all_s(shard, shard.costs.recompute_s(0, sequence.known_tokens))
        return job.return_rate(0.0) * seconds < _PRICE

    def _saved_s(self, shard: ShardAccount, resident: Resident, own: range) -> float:
        """Return what it costs all requests of ``shard`` to compute or load its ``own`` positions again, in seconds.

        Where saving them costs others their saved cells, as much as that has to be computed again.
        """
        seconds = shard.costs.recompute_s(own.start, own.stop)
        if shard.saves.are_possible and (resident.is_expendable or shard.runs.has_room(len(own), EDGES_S[-1])):
            copies = 1 if resident.is_expendable else 2
            seconds = min(seconds, LOAD_S + copies * copy_s(shard, len(own)))
        return self._of_all_s(shard, seconds)

    def _of_all_s(self, shard: ShardAccount, seconds: float) -> float:
        """Return how long all requests of ``shard`` are delayed by ``seconds`` of its time, together."""
        return seconds * min(_MOST_DELAYED, 1 + len(shard.stays.residents))

    def _pay(self, shard: ShardAccount, resident: Resident) -> None:
        """Charge for the time since ``resident`` was looked at, for which it was held."""
        now_s, spec = self._clock.now_s, resident.sequence.spec
        seconds = now_s - max(resident.hold.rent_paid_s, resident.last_used_s)
        resident.hold.rent_paid_s = now_s
        if 0 < seconds <= _LONGEST_RENT_S:
            resident.hold.held_s += seconds
            if shard.costs.mean_step_s:
                self._shares.charge(spec.tenant, spec.session, OUTPUT_TOKEN * seconds / shard.costs.mean_step_s)


def _comes_back(sequence: Sequence) -> bool:
    """Whether anything is known of its key by which its job goes on after ``sequence``."""
    return sequence.job is not None and sequence.job.may_return


def _is_shorter(resident: Resident, source: ParkedSequence | None) -> bool:
    """Whether ``resident`` gives way to a request that goes on from ``source``, if it does.

    The longest ones keep their cells, since most is lost with theirs. Else two that do not fit beside each other would
    cut each other back in turn.
    """
    return source is not None and resident.computed < source.computed
