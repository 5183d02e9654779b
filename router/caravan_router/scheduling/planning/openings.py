"""Where waiting requests could start: brought up to date by each shard that changes, so that no plan asks them all."""

import bisect
import itertools
import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from caravan_router.scheduling.planning.forecast import OutputLengths
from caravan_router.scheduling.planning.prefix_index import PrefixIndex
from caravan_router.scheduling.planning.shard_lines import ShardLines
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.ledger import Clock, ShardLedger
from caravan_router.scheduling.shard.resident import Resident

# Most prompts with an equally long common prefix that are compared with a request, and most busy shards.
_MOST_PROMPTS = 8
_MOST_HOLDERS = 3
# The cost of sharing a shard with one more sequence, in prompt tokens that could be computed in that time.
_TOKENS_PER_RESIDENT = 64
# A second of computing that could be saved counts so much, since it delays residents, and more while others wait.
_LEAST_WEIGHT = 4.0
_MOST_WEIGHT = 8.0
# How far what is known of a shard's speed follows each look at it: a disturbed step must not turn requests away.
_NEWEST_SPEED = 0.05
# A second of waiting for an emptier shard counts so much: it is certain, while the residents of a fuller one may end.
_WAIT_WEIGHT = 4.0
# Most shards whose step ends soon that are considered.
_MOST_SOON_FREE = 4
# The seconds of a prompt token before any was measured.
_FIRST_TOKEN_S = 1e-3


class _Awaited(NamedTuple):
    """A prompt that a request waits for: until then, or until a shard opens that costs less than this to share."""

    leader: Resident
    sharing_s: float
    until_s: float


class Openings:
    """The shards that can take a request, those that compute prompts, and what was found in vain since they changed.

    A shard *sleeps* when it has sequence ids but no cells for the requests that it was asked for. It wakes when it
    changes. Until then it is asked for new requests only. It has residents, so it does change.
    """

    def __init__(
        self, shards: Mapping[str, ShardLedger], clock: Clock | None = None, lengths: OutputLengths | None = None
    ) -> None:
        self._shards = shards
        self._clock = clock or Clock()
        self._lengths = lengths or OutputLengths()
        self._known: dict[str, ShardLedger] = {}
        self._open: dict[str, ShardLedger] = {}
        self._asleep: set[str] = set()
        self._prefixes = PrefixIndex()
        # Requests that wait for a busy shard.
        self._lines = ShardLines()
        # Measured seconds of a prompt token, by shard.
        self._token_s: dict[str, float] = {}
        # Prompts under way on shards that do not drain: by shard, and by the landmarks of the prompt.
        self._prompts: dict[str, list[Resident]] = {}
        self._by_landmark: dict[int, dict[Resident, ShardLedger]] = {}
        # Shards that can take a request after the step under way: the weighted time at which that ends plus the cost of
        # sharing them, in seconds, and their names; ascending. The same by name.
        self._soon_free: list[tuple[float, str]] = []
        self._soon_costs: dict[str, float] = {}
        self._with_two_layouts: set[str] = set()
        # Shards that changed so that a request may start there, by whether they can take a command.
        self._due: set[str] = set()
        self._due_later: set[str] = set()
        # Requests that no shard had room for, by id: those that sleep need not be asked again.
        self._refused: set[int] = set()
        # Requests that wait for a prefix that is being computed, by id.
        self._awaited: dict[int, _Awaited] = {}
        # The least cost of sharing an open shard; None if that is to be looked up.
        self._least_sharing_s: float | None = None
        # Shards that refused a request for its cells, and shards that would have taken one, in this plan.
        self._short: set[str] = set()
        self._willing: set[str] = set()
        # How many requests wait for an emptier shard in this plan, by its name.
        self._postponed: dict[str, int] = {}
        # Requests that began to wait for a busy shard, in this plan.
        self.begun_to_wait: list[Sequence] = []
        # How much a second of computing costs that could be saved, in seconds.
        self.computing_weight = _LEAST_WEIGHT

    # Shards

    def note(self, name: str, *, may_start: bool) -> None:
        """Look at the shard ``name`` again, which changed. ``may_start``: maybe a request can start there by that."""
        shard = self._shards.get(name)
        self._least_sharing_s = None
        if self._known.get(name) is not shard:  # it is gone, or it is another of the same name
            self._forget(name)
        if shard is None:
            return
        self._known[name] = shard
        if may_start:
            self._due_later.add(name)
            self._asleep.discard(name)
        can_command = shard.can_command
        if can_command and name in self._due_later:
            self._due_later.remove(name)
            self._due.add(name)
        if (token_s := shard.costs.prompt_token_s) > 0:
            known_s = self.token_s(shard) if self._token_s else token_s
            self._token_s[name] = known_s + _NEWEST_SPEED * (token_s - known_s)
        is_free = shard.free_sequences > 0
        _keep(self._open, shard, is_free and can_command)
        self._prefixes.apply(name, shard.take_prefix_changes())
        self._note_prompts(shard, [] if shard.draining else shard.prefilling)
        if shard.limits.other_layout is None:
            self._with_two_layouts.discard(name)
        else:
            self._with_two_layouts.add(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        self._due.discard(name)
        self._due_later.discard(name)
        self._asleep.discard(name)
        self._open.pop(name, None)
        self._token_s.pop(name, None)
        self._prefixes.forget(name)
        self._forget_prompts(name)
        self._with_two_layouts.discard(name)

    @property
    def is_due(self) -> bool:
        """Whether a shard that can take a command changed since the last plan so that a request may start there."""
        return bool(self._due)

    @property
    def any_has_two_layouts(self) -> bool:
        return bool(self._with_two_layouts)

    def _note_prompts(self, shard: ShardLedger, prompts: list[Resident]) -> None:
        if shard.name in self._prompts:
            self._forget_prompts(shard.name)
        if not prompts:
            return
        self._prompts[shard.name] = prompts
        for resident in prompts:
            for landmark in _landmarks(resident.sequence):
                self._by_landmark.setdefault(landmark, {})[resident] = shard
        if shard.free_sequences > 0 and shard.completes_prefill:
            cost_s = self._soon_costs[shard.name] = _WAIT_WEIGHT * shard.busy_until_s + self.sharing_s(shard)
            bisect.insort(self._soon_free, (cost_s, shard.name))

    def _forget_prompts(self, name: str) -> None:
        for resident in self._prompts.pop(name, ()):
            for landmark in _landmarks(resident.sequence):
                residents = self._by_landmark[landmark]
                del residents[resident]
                if not residents:
                    del self._by_landmark[landmark]
        cost_s = self._soon_costs.pop(name, None)
        if cost_s is not None:
            del self._soon_free[bisect.bisect_left(self._soon_free, (cost_s, name))]

    def prompts_like(self, sequence: Sequence) -> Iterable[tuple[Resident, ShardLedger]]:
        """Return prompts under way with the most in common with ``sequence``, as far as landmarks tell, and where."""
        for landmark in reversed(_landmarks(sequence)):
            if (found := self._by_landmark.get(landmark)) is not None:
                return itertools.islice(found.items(), _MOST_PROMPTS)
        return ()

    # Costs

    def token_s(self, shard: ShardAccount) -> float:
        """Return the measured seconds of a prompt token. A shard that has computed none is taken for the fastest."""
        return self._token_s.get(shard.name) or min(self._token_s.values(), default=_FIRST_TOKEN_S)

    def sharing_s(self, shard: ShardAccount, more: int = 0) -> float:
        """Return what sharing ``shard`` with its residents, and so many ``more``, costs a request, in seconds."""
        return self.token_s(shard) * _TOKENS_PER_RESIDENT * (len(shard.residents) + more)

    def soon_better(self, than: ShardAccount) -> ShardAccount | None:
        """Return a shard whose step ends so soon, and that is so much emptier than ``than``, that it costs less.

        Requests that wait for it already count as its residents. On ``than``, prompts are to be computed first.
        """
        pending = sum(one.target - one.computed for one in self._prompts.get(than.name, ()))
        limit_s = self.sharing_s(than) + self.token_s(than) * pending
        for _, name in self._soon_free[:_MOST_SOON_FREE]:
            shard = self._shards[name]
            sharing_s = self.sharing_s(shard, self._postponed.get(name, 0))
            if _WAIT_WEIGHT * self._step_left_s(shard) + sharing_s < limit_s:
                return shard
        return None

    def wait_s(self, shard: ShardAccount) -> float:
        """Return in how many seconds ``shard``, which is busy or full, can start one more; infinite if unknown."""
        if shard.draining:
            return math.inf
        step_s = self._step_left_s(shard)
        ahead = self._lines.length(shard.name) - shard.free_sequences
        if ahead < 0:
            return step_s
        slot_s = self._lengths.mean * shard.costs.mean_step_s / max(1, len(shard.residents))
        return max(step_s, slot_s * (ahead + 1)) if slot_s > 0 else math.inf

    # Prefixes on busy shards

    def may_hold(self, sequence: Sequence) -> Collection[str] | None:
        """Return the shards that may have a prefix of ``sequence``; None if any may, since it is too short to tell."""
        landmarks = _landmarks(sequence)
        return self._prefixes.may_hold(landmarks) if landmarks else None

    def busy_holders(self, sequence: Sequence) -> list[tuple[float, ShardLedger]]:
        """Return shards that have much of ``sequence`` and cannot take it now, with what waiting and sharing cost.

        These are seconds, and the cheapest come first.
        """
        names = self._prefixes.holders(_landmarks(sequence))
        busy = [self._shards[name] for name in names if name not in self._open and name in self._shards]
        found = [(self.wait_s(shard) + self.sharing_s(shard), shard.name) for shard in busy]
        return [(cost_s, self._shards[name]) for cost_s, name in sorted(found)[:_MOST_HOLDERS]]

    def is_patient(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` may wait for its prefix: if every prefix that comes were waited for, it might starve."""
        return sequence.patient_until_s is None or self._clock.now_s < sequence.patient_until_s

    def note_waits_for(self, sequence: Sequence, shard: ShardAccount, most_s: float) -> None:
        """Note that ``sequence`` waits for ``shard``, though another could start it now; for any at most ``most_s``."""
        self._lines.join(shard.name, sequence, self._patience(sequence, most_s))
        self.begun_to_wait.append(sequence)

    def _patience(self, sequence: Sequence, most_s: float) -> float:
        """Return until when ``sequence`` waits for its prefix: for ``most_s`` from the first time on."""
        if sequence.patient_until_s is None:
            sequence.patient_until_s = self._clock.now_s + most_s
        return sequence.patient_until_s

    def call(self, changed: Iterable[str]) -> list[Sequence]:
        """Return requests to ask for again: the shard that they wait for can take them or is gone, or it took long."""
        found = list(self._lines.call_late(self._clock.now_s))
        for name in changed:
            length = self._lines.length(name)
            if not length:
                continue
            shard = self._shards.get(name)
            if shard is None or shard.draining or not shard.residents:
                found += self._lines.call(name, length)
            elif name in self._open:
                found += self._lines.call(name, shard.free_sequences)
        return found

    def call_all(self) -> list[Sequence]:
        """Return all requests that wait for a shard. They wait for none any more."""
        return self._lines.call_all()

    # A plan

    def begin_admission(self, *, waiting: int, anew: bool) -> None:
        """Begin to ask for ``waiting`` requests. ``anew``: what was found before does not count."""
        self.begun_to_wait = []
        self.computing_weight = min(_MOST_WEIGHT, _LEAST_WEIGHT + waiting / max(1, len(self._shards)))
        self._due.clear()
        self._short.clear()
        self._willing.clear()
        self._postponed = {}
        if anew:
            self._asleep.clear()
            self._refused.clear()
            self._awaited.clear()

    def end_admission(self) -> None:
        """Let shards sleep that had no cells for requests and would have taken none."""
        self._asleep |= {name for name in self._short - self._willing if self._shards[name].residents}

    def open_to(self, sequence: Sequence) -> list[ShardLedger]:
        """Return the shards that are to be asked whether ``sequence`` can start."""
        if self._asleep and sequence.request_id in self._refused:
            return [shard for name, shard in self._open.items() if name not in self._asleep]
        return list(self._open.values())

    def _step_left_s(self, shard: ShardAccount) -> float:
        """Return how many more seconds the step of ``shard`` takes. A late one is expected to take as long again."""
        return abs(shard.busy_until_s - self._clock.now_s) if math.isfinite(shard.busy_until_s) else 0.0

    @property
    def is_any_open(self) -> bool:
        """Whether a shard could take any request."""
        return bool(self._open)

    def close(self, shard: ShardAccount) -> None:
        """Note that the next step of ``shard`` takes no more requests."""
        self._open.pop(shard.name, None)
        self._least_sharing_s = None

    # What was found

    def note_short(self, shard: ShardAccount) -> None:
        """Note that ``shard`` has too few cells for a request."""
        self._short.add(shard.name)

    def note_refused(self, sequence: Sequence) -> None:
        """Note that no shard has room for ``sequence``."""
        self._refused.add(sequence.request_id)

    def note_postponed(self, shard: ShardAccount, to: ShardAccount) -> None:
        """Note that ``shard`` could take a request that waits for ``to``, which is emptier."""
        self._willing.add(shard.name)
        self._postponed[to.name] = self._postponed.get(to.name, 0) + 1

    def note_willing(self, shard: ShardAccount) -> None:
        """Note that ``shard`` could take a request that waits for another shard."""
        self._willing.add(shard.name)

    def note_awaited(
        self, sequence: Sequence, leader: Resident, shard: ShardAccount, sharing_s: float, most_s: float = math.inf
    ) -> None:
        """Note that ``sequence`` could start on ``shard`` and waits until the prompt of ``leader`` is computed.

        It waits no longer if a shard opens that costs less than ``sharing_s`` to share; for any prefix at most
        ``most_s``.
        """
        self._willing.add(shard.name)
        until_s = self._patience(sequence, most_s) if most_s < math.inf else most_s
        self._awaited[sequence.request_id] = _Awaited(leader, sharing_s, until_s)

    def awaits_prefix(self, request_id: int) -> bool:
        """Whether a request waits for a prefix that is still being computed, and no cheaper shard is open."""
        awaited = self._awaited.get(request_id)
        if awaited is None:
            return False
        leader, sharing_s, until_s = awaited
        if leader.computed >= leader.target or not leader.status.is_live or self._clock.now_s >= until_s:
            return False
        if self._least_sharing_s is None:
            self._least_sharing_s = min(map(self.sharing_s, self._open.values()), default=0.0)
        return self._least_sharing_s >= sharing_s

    def note_start(self, sequence: Sequence, shard: ShardAccount) -> None:
        """Note that ``sequence`` starts on ``shard``."""
        self._refused.discard(sequence.request_id)
        self._awaited.pop(sequence.request_id, None)
        sequence.patient_until_s = None
        self.note(shard.name, may_start=False)


def _landmarks(sequence: Sequence) -> tuple[int, ...]:
    """Return the landmarks of its prompt."""
    return sequence.landmarks(len(sequence.spec.prompt))


def _keep(found: dict[str, ShardLedger], shard: ShardLedger, is_in: bool) -> None:
    if is_in:
        found[shard.name] = shard
    else:
        found.pop(shard.name, None)
