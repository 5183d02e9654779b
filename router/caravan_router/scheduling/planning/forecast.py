"""Whether a shard has the cells for one more sequence."""

from collections.abc import Collection

from caravan_router.scheduling.planning.output_length import OutputLengths
from caravan_router.scheduling.planning.peak import peak_cells
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.shard.resident import Resident

# Cells that each sequence should still be able to take after an admission, lest the next pass preempts.
GROWTH_CELLS = 8


class CellForecast:
    """What the residents of a shard hold and will need until they end; made anew after each change of theirs.

    The need is an expectation (outputs seldom get longer than ``lengths`` says): if it proves wrong, somebody is
    preempted. ``watermark``: part of the cells that is left free for that.
    """

    def __init__(
        self, shard: ShardState, lengths: OutputLengths, watermark: float, without: Collection[Resident] = ()
    ) -> None:
        """As if the residents ``without`` were gone."""
        self._lengths = lengths
        self._limit = shard.capacity * (1 - watermark)
        residents = [resident for resident in shard.residents.values() if resident not in without]
        available = shard.available_cells + sum(resident.own_cells for resident in without)
        # A lone sequence fits by itself: that was seen at the door.
        self._always_fits = not residents or shard.is_bounded_by_sequence
        self._available = available - GROWTH_CELLS * (len(residents) + 1)
        # What each holds alone comes back when it ends; what several hold, when the last of them does.
        self._entries = [(resident.own_cells, self._to_come(resident.sequence)) for resident in residents]
        self._base = shard.capacity - available - sum(held for held, _ in self._entries)

    def has_room(self, sequence: Sequence, known_live: int) -> bool:
        """Whether ``sequence`` fits too; ``known_live``: tokens of it in cells that running sequences hold anyway."""
        if self._always_fits:
            return True
        new_cells = sequence.known_tokens - known_live
        if new_cells > self._available:
            return False
        entries = [*self._entries, (new_cells, self._to_come(sequence))]
        return self._base + peak_cells(entries) <= self._limit

    def _to_come(self, sequence: Sequence) -> int:
        """Output tokens it will take cells for from now on, as far as one can tell; the last one takes none."""
        generated = len(sequence.output)
        return max(0, self._lengths.expected(generated, sequence.spec.stopping.max_new_tokens) - generated - 1)
