"""Which saved runs have a beginning, without which nobody can start from them."""

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Beginnings(Generic[K]):
    """The cuts behind which runs may start, by whatever names them."""

    def __init__(self, cuts: Collection[K] = ()) -> None:
        """``cuts``: those that there are already."""
        self._known = cuts
        self._added: set[K] = set()

    def note(self, start: int, before: K, cuts: Iterable[tuple[int, K]]) -> bool:
        """Return whether a run has a beginning. If so, others may start at its ``cuts``."""
        if start and before not in self._added and before not in self._known:
            return False
        self._added.update(key for _, key in cuts)
        return True
