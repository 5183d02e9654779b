"""A shard that drains: it takes no more sequences, and ends once nobody needs what it has."""

from dataclasses import dataclass


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
