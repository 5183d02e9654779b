"""The swap space: swapped sequences and their saved states. Only the worker's thread calls it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caravan_shard.arrays import State
from caravan_shard.sequences.sequence import Sequence as ShardSequence
from caravan_shard.sequences.state_stores import StateStore

# Twice what a shard can hold. Bounds the open files, and the memory of sequences beside their states.
MOST_SWAPPED = 512


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence as it was when it was saved, and the first position of its saved state."""

    sequence: ShardSequence
    start: int


class SwapSpace:
    """Swapped sequences by handle. A state goes to the first store that has room for it."""

    def __init__(self, stores: Sequence[StateStore] = ()) -> None:
        self._stores = stores
        self._swapped: dict[int, Swapped] = {}

    def __len__(self) -> int:
        """Return how many sequences are swapped."""
        return len(self._swapped)

    def __contains__(self, handle: int) -> bool:
        return handle in self._swapped

    @property
    def capacity_bytes(self) -> int:
        """Total size of all stores."""
        return sum(store.capacity_bytes for store in self._stores)

    @property
    def used_bytes(self) -> int:
        """Bytes in use in all stores."""
        return sum(store.used_bytes for store in self._stores)

    @property
    def most_bytes(self) -> int:
        """Size of the largest state that fits now; -1 if none does."""
        if len(self) >= MOST_SWAPPED:
            return -1
        return max((store.capacity_bytes - store.used_bytes for store in self._stores), default=-1)

    def peek(self, handle: int) -> Swapped | None:
        """Return the sequence of a handle; None if the handle is unknown."""
        return self._swapped.get(handle)

    def put(self, handle: int, swapped: Swapped, state: State) -> bool:
        """Keep a sequence under a new handle; False if there is no room."""
        assert handle not in self._swapped, f"handle {handle} is in use"
        if len(self) >= MOST_SWAPPED:
            return False
        for store in self._stores:
            if store.used_bytes + state.nbytes <= store.capacity_bytes and store.put(handle, state):
                self._swapped[handle] = swapped
                return True
        return False

    def take(self, handle: int) -> tuple[Swapped, State] | None:
        """Remove and return a sequence; None if the handle is unknown or its state cannot be read."""
        swapped = self._swapped.pop(handle, None)
        if swapped is None:
            return None
        state = next((state for store in self._stores if (state := store.take(handle)) is not None), None)
        return None if state is None else (swapped, state)

    def drop(self, handles: Iterable[int]) -> None:
        """Remove sequences; unknown handles are ignored."""
        for handle in handles:
            if self._swapped.pop(handle, None) is not None:
                for store in self._stores:
                    store.drop(handle)

    def clear(self) -> None:
        """Remove all sequences."""
        self.drop(list(self._swapped))
