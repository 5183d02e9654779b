"""A saved run: what is known of it beside its cells."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """The cells [start, end) of a sequence, ``size`` bytes; without cells, its recurrent state there.

    The last of ``keys`` names the run.

    ``note``: what the router wants to know of the run; any bytes.
    """

    start: int
    cuts: Sequence[int]
    keys: Sequence[bytes]
    size: int
    note: bytes = b""

    @property
    def key(self) -> bytes:
        """The name of the run."""
        return self.keys[-1]

    @property
    def end(self) -> int:
        """The position behind its last cell."""
        return self.cuts[-1]
