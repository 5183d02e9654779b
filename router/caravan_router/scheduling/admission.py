"""Whether a shard has the cells for one more sequence."""

from caravan_router.scheduling.output_length import OutputLengths
from caravan_router.scheduling.peak import peak_cells
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard_state import ShardState

# Cells that each sequence should still be able to take after an admission, lest the next pass preempts.
GROWTH_CELLS = 8


def has_cells(shard: ShardState, sequence: Sequence, known_live: int, lengths: OutputLengths, watermark: float) -> bool:
    """Whether ``sequence`` fits by what is there now, and by what all will need until they end.

    ``known_live``: tokens of it in cells that running sequences hold anyway. The need is an expectation (outputs
    seldom get longer than ``lengths`` says): if it proves wrong, somebody is preempted.
    """
    residents = shard.residents.values()
    if not residents or shard.is_bounded_by_sequence:
        return True  # that it fits by itself was seen at the door
    known = sequence.known_tokens
    new_cells = known - known_live
    if new_cells + GROWTH_CELLS * (len(residents) + 1) > shard.available_cells:
        return False
    # What each holds alone comes back when it ends; what several hold, when the last of them does.
    entries = [(max(r.target, r.computed) - r.shared, _to_come(r.sequence, lengths)) for r in residents]
    base = shard.capacity - shard.available_cells - sum(held for held, _ in entries)
    entries.append((new_cells, _to_come(sequence, lengths)))
    return base + peak_cells(entries) <= shard.capacity * (1 - watermark)


def _to_come(sequence: Sequence, lengths: OutputLengths) -> int:
    """Output tokens it will take cells for from now on, as far as one can tell; the last one takes none."""
    generated = len(sequence.output)
    return max(0, lengths.expected(generated, sequence.request.stopping.max_new_tokens) - generated - 1)
