"""Which shards have sequences that others can start from, by hashes of their beginnings."""

from collections.abc import Collection, Iterable, Sequence

from caravan_router.scheduling.shard.account import PrefixChange


class PrefixIndex:
    """The number of sequences by landmark and shard. A landmark is a hash of a prefix: see `Sequence.landmarks`."""

    def __init__(self) -> None:
        self._counts: dict[int, dict[str, int]] = {}

    def apply(self, shard: str, changes: Iterable[PrefixChange]) -> None:
        """Note what changed on ``shard``."""
        for change in changes:
            for landmark in change.landmarks:
                counts = self._counts.setdefault(landmark, {})
                count = counts.get(shard, 0) + (1 if change.is_new else -1)
                if count:
                    counts[shard] = count
                    continue
                del counts[shard]
                if not counts:
                    del self._counts[landmark]

    def forget(self, shard: str) -> None:
        """Note that ``shard`` is gone."""
        for landmark, counts in list(self._counts.items()):
            counts.pop(shard, None)
            if not counts:
                del self._counts[landmark]

    def holders(self, landmarks: Sequence[int]) -> Collection[str]:
        """Return the shards that have the longest prefix of ``landmarks`` that any shard has."""
        for landmark in reversed(landmarks):
            if (counts := self._counts.get(landmark)) is not None:
                return counts
        return ()

    def may_hold(self, landmarks: Sequence[int]) -> Collection[str]:
        """Return all shards that have any prefix of ``landmarks``."""
        return self._counts.get(landmarks[0], ()) if landmarks else ()
