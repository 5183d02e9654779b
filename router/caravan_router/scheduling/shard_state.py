"""What the router knows of one shard: who is resident, which cells and ids are taken, which commands are under way."""

import heapq
from dataclasses import dataclass, field

from caravan_router.scheduling.events import ShardLimits
from caravan_router.scheduling.sequence import Resident, Sequence
from caravan_router.scheduling.step_cost import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A command sent and not ended.

    ``residents`` by sequence id as of then: an id may be reused before late results arrive.
    """

    command_id: int
    is_decode: bool
    residents: dict[int, Resident]
    # Tokens each prompt advances by when the pass succeeds.
    chunk_tokens: dict[int, int] = field(default_factory=dict)


class ShardState:
    """The accounting of one shard. Cells are reserved for a sequence's peak, so a resident can always go on.

    Each sequence id is in exactly one of: free, resident, releasing (ended here, still held by the shard until the
    next command carries its release).
    """

    def __init__(self, name: str, limits: ShardLimits, max_residents: int | None = None) -> None:
        self.name = name
        self.limits = limits
        self._max_residents = limits.max_sequences if max_residents is None else max_residents
        self.residents: dict[int, Resident] = {}
        self.releasing: dict[int, Resident] = {}
        self.in_flight: list[InFlight] = []
        # A release that should not wait for the next pass: its client is gone.
        self.release_now = False
        self.draining = False
        self.steps_since_prefill = 0
        self.mixed_cost = StepCost()
        self.idle_cost = StepCost()
        self.free_ids = list(range(limits.max_sequences))
        self._reserved_cells = 0
        # Releases whose ids may be handed out again, to go with the command being planned.
        self._recycled: list[int] = []

    @property
    def can_command(self) -> bool:
        """Nothing is under way, or a lone Decode, which yields to the next command."""
        return not self.in_flight or (len(self.in_flight) == 1 and self.in_flight[0].is_decode)

    @property
    def completes_prefill(self) -> bool:
        """A Prefill is under way after which no prompt is left to compute."""
        if not self.in_flight or self.in_flight[-1].is_decode:
            return False
        under_way = self.in_flight[-1].chunk_tokens
        return all(
            resident.computed + under_way.get(resident.sequence_id, 0) >= resident.target
            for resident in self.prefilling
        )

    @property
    def free_sequences(self) -> int:
        """Sequence ids that the next command could hand out."""
        return len(self.free_ids) + len(self.releasing)

    @property
    def free_cells(self) -> int:
        """Cells not promised to a resident. Those of releasing sequences count: the next command frees them first."""
        return self.limits.cells - self._reserved_cells

    @property
    def used_cells(self) -> int:
        """Cells that hold computed tokens, as far as results have arrived."""
        return sum(r.computed for r in self.residents.values()) + sum(r.computed for r in self.releasing.values())

    @property
    def prefilling(self) -> list[Resident]:
        """Residents whose prompt is not complete, in the order they came."""
        return [resident for resident in self.residents.values() if resident.prefilling]

    @property
    def decoding(self) -> list[Resident]:
        """Residents that take one token per pass."""
        return [resident for resident in self.residents.values() if not resident.prefilling]

    def could_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the empty shard has room for it."""
        peak = sequence.request.peak_cells
        return peak <= self.limits.cells_per_sequence and peak <= self.limits.cells

    def can_hold(self, sequence: Sequence) -> bool:
        """Whether it fits beside the residents, once the releases are carried out."""
        return (
            not self.draining
            and self.free_sequences > 0
            and len(self.residents) < self._max_residents
            and self.could_ever_hold(sequence)
            and sequence.request.peak_cells <= self.free_cells
        )

    def place(self, sequence: Sequence) -> Resident:
        """Make it resident; ``can_hold`` was asked. The command that starts it must carry the pending releases."""
        self._recycle_ids()
        sequence_id = heapq.heappop(self.free_ids)  # the lowest: split caches batch neighbouring ids together
        resident = Resident(sequence, sequence_id, target=sequence.known_tokens)
        self.residents[sequence_id] = resident
        self._reserved_cells += sequence.request.peak_cells
        return resident

    def evict(self, resident: Resident) -> None:
        """End its stay: the shard is told with the next command, if it has heard of it at all."""
        assert self.residents.get(resident.sequence_id) is resident, f"{resident.sequence_id} is not resident"
        resident.live = False
        del self.residents[resident.sequence_id]
        if resident.computed or self._has_chunk_in_flight(resident):
            self.releasing[resident.sequence_id] = resident
        else:
            heapq.heappush(self.free_ids, resident.sequence_id)
        self._reserved_cells -= resident.sequence.request.peak_cells

    def _has_chunk_in_flight(self, resident: Resident) -> bool:
        return any(
            resident.sequence_id in command.chunk_tokens and command.residents[resident.sequence_id] is resident
            for command in self.in_flight
        )

    def fail_pass(self, command: InFlight) -> None:
        """The pass changed nothing: a prompt that was to begin with it is still unknown to the shard."""
        for sequence_id in command.chunk_tokens:
            resident = command.residents[sequence_id]
            if resident.computed == 0 and self.releasing.get(sequence_id) is resident:
                del self.releasing[sequence_id]
                heapq.heappush(self.free_ids, sequence_id)
        command.chunk_tokens.clear()

    def take_releases(self) -> tuple[int, ...]:
        """The releases the next command carries; their ids are free for the commands after."""
        self._recycle_ids()
        releases, self._recycled = tuple(self._recycled), []
        self.release_now = False
        return releases

    def _recycle_ids(self) -> None:
        for sequence_id in self.releasing:
            heapq.heappush(self.free_ids, sequence_id)
            self._recycled.append(sequence_id)
        self.releasing.clear()
