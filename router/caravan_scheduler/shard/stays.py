"""The sequence ids of a shard, and the stays under them."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from caravan_scheduler.shard.resident import TRANSITIONS, Resident, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from caravan_scheduler.beams import BeamGroup
    from caravan_scheduler.sequence import Sequence


# Other sequences can start from residents in these states.
_SOURCES = (Status.RUNNING, Status.PARKED)


@dataclass(slots=True)
class Drain:
    """``began_s``: when the shard began to drain, in seconds on the scheduler's clock, if it ``has_begun``.

    ``has_moved_prefixes``: whether what it keeps of ended sequences has been offered to others. ``has_ended``: whether
    the shard may end.
    """

    has_begun: bool = False
    began_s: float = 0.0
    has_moved_prefixes: bool = False
    has_ended: bool = False

    def begin(self, now_s: float) -> None:
        """Note that the shard drains, if that is new."""
        if not self.has_begun:
            self.has_begun, self.began_s = True, now_s


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """Sequences can start from the prefixes with these hashes on one more sequence of a shard, or on one fewer."""

    prefix_hashes: tuple[int, ...]
    is_new: bool


class Stays:
    """Every sequence id is free or belongs to the one `Resident` whose status says what the shard does with it.

    By id, ``residents``: sequences that start or run, in the order in which they were placed. ``leaving``: those whose
    Save under way releases them. ``parked``: ended ones whose cells are kept, least recently used first. ``releasing``:
    those that the next command releases. ``beam_groups``: the residents of each beam search, by index.
    ``free_ids``: those that nobody holds. ``incomplete``: the residents that have tokens left to compute before they
    decode, in the order of ``residents`` but for beams. ``version`` grows with each change of a status.
    """

    def __init__(self, max_sequences: int, most_residents: int, drain: Drain) -> None:
        self._most_residents = most_residents
        self._drain = drain
        residents, leaving = dict[int, Resident](), dict[int, Resident]()
        parked, releasing = dict[int, Resident](), dict[int, Resident]()
        self._table_of = {
            Status.STARTING: residents,
            Status.LOADED: residents,
            Status.RUNNING: residents,
            Status.LEAVING: leaving,
            Status.DROPPED: leaving,
            Status.PARKED: parked,
            Status.RELEASING: releasing,
        }
        self.residents: Mapping[int, Resident] = residents
        self.leaving: Mapping[int, Resident] = leaving
        self.parked: Mapping[int, Resident] = parked
        self.releasing: Mapping[int, Resident] = releasing
        self._incomplete = dict[int, Resident]()
        self.incomplete: Mapping[int, Resident] = self._incomplete
        self.beam_groups: dict[BeamGroup[Sequence], dict[int, Resident]] = {}
        # Number of residents of each adapter.
        self._adapters: Counter[str] = Counter()
        # Number of residents that are bulk work.
        self.bulk = 0
        self.version = 0
        self._free_ids = list(range(max_sequences))
        self.free_ids: Collection[int] = self._free_ids
        # Changes of the prefixes that sequences can start from, which nobody has taken.
        self._prefix_changes: list[PrefixChange] = []

    @property
    def free_sequences(self) -> int:
        """How many sequences could start with the next command if all parked ones were evicted."""
        if self._drain.has_begun:
            return 0
        ids = len(self._free_ids) + len(self.releasing) + len(self.parked)
        free = min(ids, self._most_residents - len(self.residents))
        if self.beam_groups:  # beams that have yet to branch off need theirs
            free -= sum(group.width - len(beams) for group, beams in self.beam_groups.items())
        return free

    @property
    def prefilling(self) -> list[Resident]:
        """Residents whose prompt is not complete, by descending priority, then in the order of ``residents``.

        Beams are left out.
        """
        found = [one for one in self._incomplete.values() if not one.is_beam]
        return sorted(found, key=lambda resident: -resident.priority) if len(found) > 1 else found

    @property
    def decoding(self) -> list[Resident]:
        """Residents that take one token per step, without beams."""
        if not self._incomplete and not self.beam_groups:
            return list(self.residents.values())
        return [one for key, one in self.residents.items() if key not in self._incomplete and not one.is_beam]

    @property
    def adapters(self) -> set[str]:
        """The adapters of the residents."""
        return set(self._adapters)

    def overtaken_by(self, resident: Resident) -> int:
        """Return how many prompts are incomplete that started before ``resident``, whose own is complete."""
        if not self._incomplete:
            return 0
        before = itertools.takewhile(lambda one: one is not resident, self.residents.values())
        return sum(one.prefilling and not one.is_beam for one in before)

    def can_be_copied(self, sequence_id: int) -> bool:
        """Whether other sequences can start from ``sequence_id``."""
        resident = self.residents.get(sequence_id)
        return sequence_id in self.parked or (resident is not None and resident.is_running)

    # Changes, which the ledger makes

    def take_id(self, sequence_id: int) -> None:
        """Take a free id."""
        self._free_ids.remove(sequence_id)

    def enter(self, resident: Resident) -> None:
        """Note that ``resident`` starts, under an id that was taken for it."""
        self._table_of[resident.status][resident.sequence_id] = resident
        self._adapters[resident.adapter] += 1
        self.bulk += resident.sequence.is_bulk
        if (group := resident.sequence.group) is not None:
            self.beam_groups.setdefault(group, {})[group.index_of(resident.sequence)] = resident
        self.note_progress(resident)

    def note_progress(self, resident: Resident) -> None:
        """Note that more of ``resident`` is computed or is to be computed."""
        if resident.computed < resident.target:
            self._incomplete[resident.sequence_id] = resident
        else:
            self._incomplete.pop(resident.sequence_id, None)

    def move(self, resident: Resident, status: Status) -> None:
        """Change the status of ``resident``, and with it the table that holds it."""
        assert status in TRANSITIONS[resident.status], (
            f"{resident.sequence_id} from {resident.status.word} to {status.word}"
        )
        before, after = self._table_of[resident.status], self._table_of.get(status)
        if after is not before:
            if before is self.residents:
                self._leave_residents(resident)
            del before[resident.sequence_id]
            if after is not None:
                after[resident.sequence_id] = resident
        self._note_prefix_hashes(resident, status)
        resident.status = status
        self.version += 1

    def _leave_residents(self, resident: Resident) -> None:
        self._incomplete.pop(resident.sequence_id, None)
        self.bulk -= resident.sequence.is_bulk
        self._adapters[resident.adapter] -= 1
        if not self._adapters[resident.adapter]:
            del self._adapters[resident.adapter]
        if (group := resident.sequence.group) is not None:
            del self.beam_groups[group][group.index_of(resident.sequence)]
            if not self.beam_groups[group]:
                del self.beam_groups[group]

    def _note_prefix_hashes(self, resident: Resident, status: Status) -> None:
        """Note that others can start from more of ``resident``, or from nothing of it any more."""
        known = resident.prefix_hashes
        if status in _SOURCES:
            length = resident.computed if status is Status.PARKED else resident.target
            resident.prefix_hashes = resident.sequence.prefix_hashes(length)
            if len(resident.prefix_hashes) > len(known):
                self._prefix_changes.append(PrefixChange(resident.prefix_hashes[len(known) :], is_new=True))
        elif known:
            resident.prefix_hashes = ()
            self._prefix_changes.append(PrefixChange(known, is_new=False))

    def cut_back(self, resident: Resident, length: int) -> None:
        """Note that a parked sequence has given up what was behind its first ``length`` tokens."""
        known = resident.prefix_hashes
        resident.prefix_hashes = known[: len(resident.sequence.prefix_hashes(length))]
        if len(resident.prefix_hashes) < len(known):
            self._prefix_changes.append(PrefixChange(known[len(resident.prefix_hashes) :], is_new=False))
        self.version += 1

    def take_prefix_changes(self) -> list[PrefixChange]:
        """Return the changes of the prefixes that sequences can start from since the last call, in order."""
        changes, self._prefix_changes = self._prefix_changes, []
        return changes

    def note_use(self, sequence_id: int, now_s: float) -> None:
        """Note that a parked sequence is of use: it is the last to be evicted."""
        parked = self._table_of[Status.PARKED]
        resident = parked[sequence_id] = parked.pop(sequence_id)
        resident.last_used_s = now_s

    def free(self, resident: Resident) -> None:
        """End the stay of ``resident`` for good, and free its id."""
        self.move(resident, Status.GONE)
        self._free_ids.append(resident.sequence_id)

    def recycle(self) -> list[int]:
        """Free the ids that the next command releases, since it may give them to others. Return them."""
        recycled = list(self.releasing.values())
        for resident in recycled:
            self.free(resident)
        return [resident.sequence_id for resident in recycled]
