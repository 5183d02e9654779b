"""The recurrent states that a shard has saved: where sequences of such models can be continued."""

from collections import Counter
from collections.abc import Iterator

from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.shard.kept_run import KeptRun


class SavedStates:
    """The runs that are states, by the keys of the prefixes that they end."""

    def __init__(self) -> None:
        self._states: dict[bytes, KeptRun] = {}
        # How many there are at each length.
        self._ends: Counter[int] = Counter()
        # The largest size of a state seen, in bytes.
        self.size_bytes = 0

    def get(self, key: bytes) -> KeptRun | None:
        """Return the state at the end of the prefix that ``key`` names."""
        return self._states.get(key)

    def backwards(self, keys: PrefixKeys, most: int) -> Iterator[KeptRun]:
        """Yield the states within the first ``most`` tokens of a sequence, the last one first."""
        for end in sorted((end for end in self._ends if end <= most), reverse=True):
            state = self._states.get(keys.at(end))
            if state is not None:
                yield state

    # Changes

    def add(self, run: KeptRun) -> None:
        """Note a state."""
        self._states[run.prefix_key] = run
        self._ends[run.end] += 1
        self.size_bytes = max(self.size_bytes, run.size_bytes)

    def forget(self, run: KeptRun) -> None:
        """Note that the shard no longer has this state."""
        del self._states[run.prefix_key]
        self._ends[run.end] -= 1
        if not self._ends[run.end]:
            del self._ends[run.end]
