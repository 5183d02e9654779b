"""Shows the sequences as they will be once a command's header has been carried out; changes nothing."""

from collections.abc import Iterator, Mapping, Sequence

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Header, PrefixCopy
from caravan_shard.backends.base import Capacity
from caravan_shard.checks.first_refusal import first_refusal
from caravan_shard.checks.media import check_border
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import Refusal, bad_request
from caravan_shard.sequences.sequence import Phase
from caravan_shard.sequences.sequence import Sequence as ShardSequence

KEY_BYTES = 16


class Preview:
    """Call `check_header` first; all other methods answer for the time after the header."""

    def __init__(self, held: Mapping[int, ShardSequence], capacity: Capacity) -> None:
        self._held = held
        self._capacity = capacity
        self._released: frozenset[int] = frozenset()
        self._parked: dict[int, int] = {}

    @first_refusal
    def check_header(self, header: Header) -> Iterator[Refusal | None]:
        """Check the releases, the parks, then the keys."""
        yield self.check_listed(header.release)
        self._released = frozenset(header.release)
        yield self.check_listed([sequence_id for sequence_id, _ in header.park])
        for sequence_id, length in header.park:
            yield self.check_prefix(PrefixCopy(sequence_id, length))
        self._parked = dict(header.park)
        yield check_keys([*header.drop_runs, *header.spill_runs])

    def find(self, sequence_id: int) -> ShardSequence | None:
        """Return a sequence as it is now, if it will still be held; see `length` and `phase`."""
        return None if sequence_id in self._released else self._held.get(sequence_id)

    def held_ids(self) -> list[int]:
        """Return the ids of the sequences that will be held."""
        return [sequence_id for sequence_id in self._held if sequence_id not in self._released]

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of a sequence that will be held will be in the cache."""
        return self._parked.get(sequence_id, self._held[sequence_id].computed)

    def phase(self, sequence_id: int) -> Phase:
        """Return the phase of a sequence that will be held."""
        return Phase.ENDED if sequence_id in self._parked else self._held[sequence_id].phase

    def parameters(self, sequence_id: int) -> PreparedParameters:
        """Return the parameters of a sequence that will be held."""
        return self._held[sequence_id].parameters

    def check_listed(self, sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that the ids are in range, that none occurs twice, and that all are held."""
        return self.check_distinct(sequence_ids) or self.check_known(sequence_ids)

    def check_distinct(self, sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that the ids are in range and that none occurs twice."""
        seen: set[int] = set()
        for sequence_id in sequence_ids:
            if not 0 <= sequence_id < self._capacity.max_sequences:
                return bad_request(f"sequence ids must be < {self._capacity.max_sequences}. Given: {sequence_id}")
            if sequence_id in seen:
                return bad_request(f"sequence {sequence_id} is listed twice")
            seen.add(sequence_id)
        return None

    def check_known(self, sequence_ids: Sequence[int]) -> Refusal | None:
        """Check that all are held."""
        for sequence_id in sequence_ids:
            if self.find(sequence_id) is None:
                return Refusal(ShardError.UNKNOWN_SEQUENCE, f"sequence {sequence_id} is not held here")
        return None

    def check_prefix(self, prefix: PrefixCopy, adapter: str | None = None, *, may_cut: bool = False) -> Refusal | None:
        """Check that the prefix can be kept or copied; with ``adapter``, that it was computed with that one.

        ``may_cut``: its cells alone are needed, so it may be any part.
        """
        refusal = self.check_known([prefix.source_id])
        if refusal is not None:
            return refusal
        if adapter is not None and adapter != self.parameters(prefix.source_id).adapter:
            return bad_request(f"sequence {prefix.source_id} was computed with another adapter")
        computed = self.length(prefix.source_id)
        if not 1 <= prefix.length <= computed:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"sequence {prefix.source_id} holds {computed} tokens; a prefix has 1 to {computed}. "
                f"Given: {prefix.length}",
            )
        if self._capacity.current.whole_only and prefix.length != computed and not may_cut:
            return Refusal(
                ShardError.WRONG_POSITION,
                f"this model shares only whole sequences: {computed} tokens. Given: {prefix.length}",
            )
        return check_border(self._held[prefix.source_id].spans, prefix.length)


def check_keys(keys: Sequence[bytes]) -> Refusal | None:
    """Check the length of keys of runs."""
    for key in keys:
        if len(key) != KEY_BYTES:
            return bad_request(f"the key of a run has {KEY_BYTES} bytes. Given: {len(key)}")
    return None
