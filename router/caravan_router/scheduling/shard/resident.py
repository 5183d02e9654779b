"""A sequence's stay on one shard."""

from dataclasses import dataclass

from caravan_router.scheduling.sequence import Sequence


@dataclass(slots=True, eq=False)
class Resident:
    """A sequence's stay on one shard: a sequence id and cells, owned by it until it is released or parked.

        position 0 ... shared ........ computed ........ target
                 copied       in the cache       to prefill    then one token per decode

    ``live`` ends when the sequence ends, is cancelled or is taken back; results that arrive later are ignored.
    ``begun``: the shard knows it. ``indexed``: how much of it is in the prefix tree. ``priority``: as it was admitted.
    """

    sequence: Sequence
    sequence_id: int
    # Known tokens at placement: prefill lets `computed` catch up with it.
    target: int
    priority: int = 0
    shared: int = 0
    computed: int = 0
    indexed: int = 0
    takes_over: bool = False
    source_id: int | None = None
    begun: bool = False
    live: bool = True

    @property
    def adapter(self) -> str:
        return self.sequence.spec.adapter

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def own_cells(self) -> int:
        """Cells that nobody else needed for it, those of its prompt still to come with them."""
        return max(self.target, self.computed) - self.shared
