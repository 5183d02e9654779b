"""Whose adapter the next pass of a shard has: a pass has one, so those that are wanted take turns."""

from collections.abc import Collection

# Passes in a row while another adapter is wanted: a switch costs a pass a part of its time, a turn the others' gaps.
TURN_PASSES = 8


class AdapterTurn:
    """``adapter``: of the last pass; empty for none."""

    def __init__(self) -> None:
        self.adapter = ""
        self._passes = 0
        # Least recently used first.
        self._used: dict[str, None] = {}

    @property
    def is_over(self) -> bool:
        """Another adapter goes next, if one is wanted."""
        return self._passes >= TURN_PASSES

    @property
    def passes_left(self) -> int:
        """Before another adapter goes next; at least one."""
        return max(1, TURN_PASSES - self._passes)

    def next(self, wanted: Collection[str]) -> str:
        """Of those ``wanted``: the one whose turn it is, else the one whose last turn is longest ago."""
        if not wanted or wanted == {self.adapter} or (self.adapter in wanted and not self.is_over):
            return self.adapter
        places = {adapter: place for place, adapter in enumerate(self._used)}
        # The one whose turn is over is the last of those used.
        return min(wanted, key=lambda adapter: (places.get(adapter, -1), adapter))

    def take(self, adapter: str) -> None:
        """A command with ``adapter`` is sent: a turn begins, if it was another's or this one's is over."""
        if adapter != self.adapter or self.is_over:
            self.adapter, self._passes = adapter, 0
        self._used.pop(adapter, None)
        self._used[adapter] = None

    def count_pass(self) -> bool:
        """A pass is done; whether the turn ended with it."""
        self._passes += 1
        return self._passes == TURN_PASSES
