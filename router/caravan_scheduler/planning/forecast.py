"""How many cells the sequences of a shard will need, and whether there is room for one more."""

from collections.abc import Collection, Iterable
from operator import itemgetter

from caravan_scheduler.output_lengths import OutputLengths
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident

# Cells that each sequence should still be able to take after an admission. With fewer, the next step might preempt.
GROWTH_CELLS = 8


def peak_cells(entries: Iterable[tuple[int, int]]) -> int:
    """Return the most cells in use at once if each entry (cells held, cells to come) takes one a step, then frees all.

    LightLLM's estimate (Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv 2507.10150).
    The need falls only when a sequence ends, so the peak is at some sequence's last step. Sequences with as much or
    more to come are there then, each grown by what that one had to come.
    """
    held_by_longer = peak = 0
    for count, (held, remaining) in enumerate(sorted(entries, key=itemgetter(1), reverse=True), 1):
        held_by_longer += held
        peak = max(peak, held_by_longer + count * remaining)
    return peak


def to_come(sequence: Sequence, lengths: OutputLengths) -> int:
    """Return how many output tokens will need cells from now on, as far as one can tell; the last needs none."""
    generated = len(sequence.output)
    return max(0, lengths.expected(generated, sequence.spec.stopping.max_new_tokens) - generated - 1)


class CellForecast:
    """What the residents of a shard hold and will need until they end; made anew after each change of the residents.

    The need is an expectation: if an output gets longer than ``lengths`` says, somebody is preempted. ``watermark`` is
    the part of the cells that is left free for that. Residents ``without`` count as if they were gone.
    """

    def __init__(
        self, shard: ShardAccount, lengths: OutputLengths, watermark: float, without: Collection[Resident] = ()
    ) -> None:
        self._lengths = lengths
        self._limit = shard.capacity.cells * (1 - watermark)
        self._residents = list(shard.stays.residents.values())
        if without:
            self._residents = [resident for resident in self._residents if resident not in without]
        # A lone sequence fits: requests that fit no empty shard never get here.
        self._always_fits = not self._residents or shard.capacity.is_bounded_by_sequence
        if self._always_fits:
            return
        available = shard.cells.available + sum(resident.own_cells for resident in without)
        self._available = available - GROWTH_CELLS * (len(self._residents) + 1)
        # Cells of one sequence alone come back when it ends; cells that several share, when the last of them does.
        self._base = shard.capacity.cells - available - sum([one.own_cells for one in self._residents])
        # What all take at once if nobody ends before its last token.
        self._most = self._base + sum([one.peak_cells - one.shared for one in self._residents])
        self._entries: list[tuple[int, int]] | None = None

    def has_room(self, sequence: Sequence, known_live: int, held: int = 0) -> bool:
        """Whether ``sequence`` fits too. ``known_live``: its first tokens that others hold in any case.

        ``held``: cells that it may not take, beside those of running sequences.
        """
        if self._always_fits:
            return not held or sequence.request.peak_cells - known_live <= self._limit - held
        beams = 1 if sequence.group is None else sequence.group.width
        # All beams have the prompt in common at the start. What they share later is not counted.
        new_cells = sequence.known_tokens - known_live + (beams - 1) * len(sequence.output)
        if new_cells > self._available - held:
            return False
        limit = self._limit - held
        others = sequence.group.most_output_cells if sequence.group is not None else 0
        if self._most + sequence.request.peak_cells + others - known_live <= limit:
            return True
        if self._entries is None:
            self._entries = [(one.own_cells, to_come(one.sequence, self._lengths)) for one in self._residents]
        return self._base + peak_cells([*self._entries, (new_cells, beams * to_come(sequence, self._lengths))]) <= limit
