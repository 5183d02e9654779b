"""The cells of a shard."""

from caravan_scheduler.prefix_tree import PrefixTree
from caravan_scheduler.shard.capacity import ShardCapacity
from caravan_scheduler.shard.command import ShardCommands
from caravan_scheduler.shard.resident import Resident, Status
from caravan_scheduler.shard.stays import Stays


class ShardCells:
    """Cells are counted, not named: ``tree`` knows which sequences share a run of them.

    The tree learns of outputs when somebody asks for what might begin with them, or when they end, so that no step has
    to tell it. Until then they are in the *tails* of residents and leaving sequences: ``tails`` counts them, and the
    ledger adds what is computed or loaded.
    """

    def __init__(self, capacity: ShardCapacity, stays: Stays, commands: ShardCommands) -> None:
        self._capacity = capacity
        self._stays = stays
        self._commands = commands
        self.tree = PrefixTree()
        self.tails = 0

    @property
    def live(self) -> int:
        """Cells of sequences that are not parked."""
        if self._capacity.limits.layout.shares_cells:
            return self.tree.live_cells + self.tails
        return sum(one.computed for one in (*self._stays.residents.values(), *self._stays.leaving.values()))

    @property
    def held(self) -> int:
        """Cells that hold tokens, including those of parked sequences."""
        if self._capacity.limits.layout.shares_cells:
            return self.tree.cells + self.tails
        return self.live + sum(self.tree.length(sequence_id) for sequence_id in self._stays.parked)

    @property
    def promised(self) -> int:
        """Cells that started prompts and commands under way will take."""
        prompts = sum([one.target - one.computed for one in self._stays.incomplete.values()])
        groups = self._stays.beam_groups
        beams = sum(group.cells_to_branch for group in groups) if groups else 0
        return prompts + beams + sum([command.coming_cells for command in self._commands.in_flight])

    @property
    def available(self) -> int:
        """Cells that could be had now if all parked sequences were evicted."""
        return self._capacity.cells - self.live - self.promised

    @property
    def free(self) -> int:
        """Cells that could be had now without evicting anything. Releases count: the next command does them first."""
        return self._capacity.cells - self.held - self.promised

    def tail(self, resident: Resident) -> int:
        """Cells of ``resident`` that the tree does not know."""
        return resident.computed - self.tree.length(resident.sequence_id)

    def index(self, resident: Resident) -> bool:
        """Enter what ``resident`` has computed into the tree. Return whether that is more than the tree knew."""
        tail = self.tail(resident)
        if tail:
            known = resident.computed - tail
            self.tails -= tail
            self.tree.extend(resident.sequence_id, resident.sequence.tokens(known, resident.computed))
        return tail > 0

    # Changes, which the ledger makes

    def forget(self, resident: Resident) -> None:
        """Count the cells of ``resident`` no more."""
        self.tails -= self.tail(resident)
        self.tree.remove(resident.sequence_id)

    def rebuild(self) -> None:
        """Enter every sequence on a path of its own: a sequence that was moved shares no cells with others."""
        held = (*self._stays.residents.values(), *self._stays.parked.values())
        self.tree = PrefixTree()
        self.tails = sum(one.computed for one in held)
        for resident in held:
            self.tree.insert(resident.sequence_id, resident.sequence.request.prefix_namespace)
            resident.shared = 0
            if resident.status is not Status.LOADED:
                self.index(resident)
            if resident.status is Status.PARKED:
                self.tree.park(resident.sequence_id)
