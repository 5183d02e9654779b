"""What it takes to move cells out of a shard's cache or back, learnt from doing it."""

from dataclasses import dataclass

# 1,000 cells of a small model in 6 ms: the guess before the first swap.
_FIRST_CELL_S = 6e-6
_NEWEST = 0.3


@dataclass(slots=True)
class SwapCost:
    """Seconds a cell, one way."""

    cell_s: float = _FIRST_CELL_S

    def observe(self, cells: int, seconds: float) -> None:
        """Learn from a swap of ``cells``."""
        if cells:
            self.cell_s += _NEWEST * (seconds / cells - self.cell_s)
