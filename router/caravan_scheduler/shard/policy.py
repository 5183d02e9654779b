"""What is kept for jobs, from whom, and which of them goes first: what a policy decides."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from caravan_scheduler.sequence import Sequence
    from caravan_scheduler.shard.account import ShardAccount
    from caravan_scheduler.shard.resident import Resident


class Held(NamedTuple):
    """What a request may not take: parked sequences with these ``ids``, and ``cells`` beside those of running ones."""

    cells: int = 0
    ids: frozenset[int] = frozenset()


NOTHING_HELD = Held()


class JobPolicy(Protocol):
    """Decides for whom the cells of ended sequences are kept, and the order of the sessions of a key.

    ``refusals`` grows whenever anything is held against a request.
    """

    refusals: int

    def in_order_of_eviction(self, shard: "ShardAccount", parked: "list[Resident]") -> "list[Resident]":
        """Return ``parked``, which are by last use, with the first to make way at the beginning."""
        ...

    def held(self, shard: "ShardAccount", sequence: "Sequence") -> Held:
        """Return what ``sequence`` may not take of ``shard``."""
        ...

    def is_expected(self, resident: "Resident") -> bool:
        """Whether a request that continues ``resident``, which is parked, is likely to come soon."""
        ...

    def charged(self, sequence: "Sequence") -> float:
        """Return what the sessions of a key are ordered by, in tokens: those with less go first."""
        ...

    def take_refusals(self) -> bool:
        """Return whether anything was held against a request since the last call: time alone may end that."""
        ...
