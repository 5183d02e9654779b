"""Who has a prefix, found by its hash."""

from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """How often each holder has a prefix, by the prefix's hash: see `Sequence.prefix_hashes`."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[T, int]] = {}

    def add(self, holder: T, hashes: Iterable[int]) -> None:
        """Note that ``holder`` has these prefixes once more."""
        for key in hashes:
            counts = self._counts.setdefault(key, {})
            counts[holder] = counts.get(holder, 0) + 1

    def remove(self, holder: T, hashes: Iterable[int]) -> None:
        """Note that ``holder`` has these prefixes once less."""
        for key in hashes:
            counts = self._counts[key]
            if counts[holder] > 1:
                counts[holder] -= 1
                continue
            del counts[holder]
            if not counts:
                del self._counts[key]

    def forget(self, holder: T) -> None:
        """Note that ``holder`` is gone."""
        for key, counts in list(self._counts.items()):
            counts.pop(holder, None)
            if not counts:
                del self._counts[key]

    def holders(self, hashes: Sequence[int]) -> Collection[T]:
        """Return who has the longest prefix of ``hashes`` that anybody has."""
        for key in reversed(hashes):
            if (counts := self._counts.get(key)) is not None:
                return counts
        return ()

    def may_hold(self, hashes: Sequence[int]) -> Collection[T] | None:
        """Return who has any prefix of ``hashes``; None if anybody may, since there are none."""
        return self._counts.get(hashes[0], ()) if hashes else None
