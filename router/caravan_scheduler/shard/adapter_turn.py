"""Which adapter the next step of a shard has. A step has one adapter, so those that are wanted take turns."""

from collections.abc import Collection

# Steps in a row while another adapter is wanted. Switching costs part of a step; a longer turn makes the others wait.
TURN_STEPS = 8


class AdapterTurn:
    """``adapter`` is that of the last step; empty for none."""

    def __init__(self) -> None:
        self.adapter = ""
        self._steps = 0
        # Least recently used first.
        self._used: dict[str, None] = {}

    @property
    def is_over(self) -> bool:
        """Whether another adapter goes next, if one is wanted."""
        return self._steps >= TURN_STEPS

    def steps_left(self, adapter: str) -> int:
        """Return how many steps ``adapter`` has in a row if it goes next."""
        return TURN_STEPS if adapter != self.adapter or self.is_over else TURN_STEPS - self._steps

    def next(self, wanted: Collection[str]) -> str:
        """Return the one of ``wanted`` whose turn it is, else the one whose last turn is longest ago."""
        if not wanted or wanted == {self.adapter} or (self.adapter in wanted and not self.is_over):
            return self.adapter
        places = {adapter: place for place, adapter in enumerate(self._used)}
        # The adapter whose turn is over is the last of those used.
        return min(wanted, key=lambda adapter: (places.get(adapter, -1), adapter))

    def take(self, adapter: str) -> None:
        """Note that a command with ``adapter`` is sent. A turn begins if it was another's or this one's is over."""
        if adapter != self.adapter or self.is_over:
            self.adapter, self._steps = adapter, 0
        self._used.pop(adapter, None)
        self._used[adapter] = None

    def count_step(self) -> bool:
        """Note that a step ended. Return whether the turn ended with it."""
        self._steps += 1
        return self._steps == TURN_STEPS
