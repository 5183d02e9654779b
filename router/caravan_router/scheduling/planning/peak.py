"""The most cells a set of sequences will need at once."""

from collections.abc import Iterable
from operator import itemgetter


def peak_cells(entries: Iterable[tuple[int, int]]) -> int:
    """Cells at the worst moment, if each entry (cells held, cells still to come) takes one per step, then frees all.

    LightLLM's estimate (Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", arXiv 2507.10150).
    The need falls only when a sequence ends, so the worst moment is one sequence's last step. Those with as much or
    more to come are there then, each grown by what that one had to come.
    """
    held_by_longer = peak = 0
    for count, (held, remaining) in enumerate(sorted(entries, key=itemgetter(1), reverse=True), 1):
        held_by_longer += held
        peak = max(peak, held_by_longer + count * remaining)
    return peak
