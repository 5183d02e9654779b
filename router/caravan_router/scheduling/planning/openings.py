"""Where waiting requests could start: brought up to date by each shard that changes, so that no plan asks them all."""

import bisect
import itertools
from collections.abc import Iterable, Mapping

from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import ShardAccount
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.shard.resident import Resident

# Of prompts that have as much in common with a request, so many are compared with it.
_MOST_PROMPTS = 8


class Openings:
    """The shards that can take a request, those that compute prompts, and what was found in vain since they changed.

    A shard *sleeps* when it has sequence ids but no cells for the requests that it was asked for. It wakes when it
    changes. Until then it is asked for new requests only. It has residents, so it does change.
    """

    def __init__(self, shards: Mapping[str, ShardLedger]) -> None:
        self._shards = shards
        self._open: dict[str, ShardLedger] = {}
        self._asleep: set[str] = set()
        # Prompts under way on shards that do not drain: by shard, and by the landmarks of the prompt.
        self._prompts: dict[str, list[Resident]] = {}
        self._by_landmark: dict[int, dict[Resident, ShardLedger]] = {}
        # Shards that can take a request after the step under way: how many residents they have, and their names;
        # ascending. The same by name.
        self._soon_free: list[tuple[int, str]] = []
        self._counts: dict[str, int] = {}
        self._with_two_layouts: set[str] = set()
        # Shards that changed so that a request may start there, by whether they can take a command.
        self._due: set[str] = set()
        self._due_later: set[str] = set()
        # Requests that no shard had room for, by id: those that sleep need not be asked again.
        self._refused: set[int] = set()
        # By the id of a request that waits for a prefix: the resident whose prompt it is, and the number of residents
        # below which starting on another shard is cheaper.
        self._awaited: dict[int, tuple[Resident, float]] = {}
        # The fewest residents of an open shard; None if that is to be looked up.
        self._fewest: int | None = None
        # Shards that refused a request for its cells, and shards that would have taken one, in this plan.
        self._short: set[str] = set()
        self._willing: set[str] = set()
        # How many requests wait for an emptier shard, in this plan.
        self.postponed = 0

    # Shards

    def note(self, name: str, *, may_start: bool) -> None:
        """Look at the shard ``name`` again, which changed. ``may_start``: maybe a request can start there by that."""
        shard = self._shards.get(name)
        self._fewest = None
        if may_start:
            self._due_later.add(name)
            self._asleep.discard(name)
        if shard is None:
            self._forget(name)
            return
        can_command = shard.can_command
        if can_command and name in self._due_later:
            self._due_later.remove(name)
            self._due.add(name)
        is_free = shard.free_sequences > 0
        _keep(self._open, shard, is_free and can_command)
        self._note_prompts(shard, [] if shard.draining else shard.prefilling)
        if shard.limits.other_layout is None:
            self._with_two_layouts.discard(name)
        else:
            self._with_two_layouts.add(name)

    def _forget(self, name: str) -> None:
        self._due.discard(name)
        self._due_later.discard(name)
        self._open.pop(name, None)
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
            for landmark in resident.sequence.landmarks:
                self._by_landmark.setdefault(landmark, {})[resident] = shard
        if shard.free_sequences > 0 and shard.completes_prefill:
            self._counts[shard.name] = len(shard.residents)
            bisect.insort(self._soon_free, (len(shard.residents), shard.name))

    def _forget_prompts(self, name: str) -> None:
        for resident in self._prompts.pop(name, ()):
            for landmark in resident.sequence.landmarks:
                residents = self._by_landmark[landmark]
                del residents[resident]
                if not residents:
                    del self._by_landmark[landmark]
        count = self._counts.pop(name, None)
        if count is not None:
            del self._soon_free[bisect.bisect_left(self._soon_free, (count, name))]

    def prompts_like(self, sequence: Sequence) -> Iterable[tuple[Resident, ShardLedger]]:
        """Return prompts under way with the most in common with ``sequence``, as far as landmarks tell, and where."""
        for landmark in reversed(sequence.landmarks):
            if (found := self._by_landmark.get(landmark)) is not None:
                return itertools.islice(found.items(), _MOST_PROMPTS)
        return ()

    def soon_better(self, than: ShardAccount) -> bool:
        """Whether a shard with fewer residents than ``than`` is free after the step under way."""
        return bool(self._soon_free) and self._soon_free[0][0] < len(than.residents)

    # A plan

    def begin_admission(self, *, anew: bool) -> None:
        """Begin to ask for waiting requests. ``anew``: what was found before does not count."""
        self._due.clear()
        self._short.clear()
        self._willing.clear()
        self.postponed = 0
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

    @property
    def is_any_open(self) -> bool:
        """Whether a shard could take any request."""
        return bool(self._open)

    def close(self, shard: ShardAccount) -> None:
        """Note that the next step of ``shard`` takes no more requests."""
        self._open.pop(shard.name, None)
        self._fewest = None

    # What was found

    def note_short(self, shard: ShardAccount) -> None:
        """Note that ``shard`` has too few cells for a request."""
        self._short.add(shard.name)

    def note_refused(self, sequence: Sequence) -> None:
        """Note that no shard has room for ``sequence``."""
        self._refused.add(sequence.request_id)

    def note_postponed(self, shard: ShardAccount) -> None:
        """Note that ``shard`` could take a request that waits for an emptier one."""
        self._willing.add(shard.name)
        self.postponed += 1

    def note_awaited(self, sequence: Sequence, leader: Resident, shard: ShardAccount, residents: float) -> None:
        """Note that ``sequence`` could start on ``shard`` and waits until the prompt of ``leader`` is computed.

        It waits no longer if a shard with fewer than ``residents`` opens: starting there is cheaper.
        """
        self._willing.add(shard.name)
        self._awaited[sequence.request_id] = (leader, residents)

    def awaits_prefix(self, request_id: int) -> bool:
        """Whether a request waits for a prefix that is still being computed, and no cheaper shard is open."""
        awaited = self._awaited.get(request_id)
        if awaited is None:
            return False
        leader, residents = awaited
        if leader.computed >= leader.target or not leader.status.is_live:
            return False
        if self._fewest is None:
            self._fewest = min((len(shard.residents) for shard in self._open.values()), default=0)
        return self._fewest >= residents

    def note_start(self, sequence: Sequence, shard: ShardAccount) -> None:
        """Note that ``sequence`` starts on ``shard``."""
        self._refused.discard(sequence.request_id)
        self._awaited.pop(sequence.request_id, None)
        self.note(shard.name, may_start=False)


def _keep(found: dict[str, ShardLedger], shard: ShardLedger, is_in: bool) -> None:
    if is_in:
        found[shard.name] = shard
    else:
        found.pop(shard.name, None)
