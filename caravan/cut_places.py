"""Where a conversation can be cut back though the model has recurrent state, which stands for all tokens so far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from caravan_scheduler.shard.checkpoints import thinned
from caravan_shard.arrays import State
from caravan_shard.backends.base import Backend, CellSlice
from caravan_shard.media import CellSpan, spans_before

_ANY_SIZE = 1 << 62


@dataclass(slots=True)
class CutPlaces:
    """States of a conversation, by how many of its tokens they stand for. Old ones are given up as `thinned` says."""

    _states: dict[int, State] = field(default_factory=dict)

    def copy(self) -> "CutPlaces":
        """Return those of a fork."""
        return CutPlaces(dict(self._states))

    def note(self, backend: Backend, sequence_id: int) -> None:
        """Save the state after all tokens that the sequence holds."""
        length = backend.length(sequence_id)
        if length in self._states:
            return
        state = backend.save(sequence_id, length, length, _ANY_SIZE, releasing=False)
        if state is not None:
            self._states[length] = state
            for gone in thinned(sorted(self._states), ()):
                del self._states[gone]

    def cut(self, backend: Backend, sequence_id: int, length: int, spans: Sequence[CellSpan] = ()) -> int:
        """Cut the sequence back to a state within its first ``length`` tokens. Return where; 0 if nothing is held.

        ``spans``: the media among these tokens that must not be cut.
        """
        self.forget_behind(length)
        place = max(self._states, default=0)
        cells = backend.save(sequence_id, 0, place, _ANY_SIZE, releasing=False) if place else None
        backend.trim(sequence_id, 0)
        if cells is None:
            return 0
        slices = [
            CellSlice(state=cells, first=0, start=0, end=place),
            CellSlice(state=self._states[place], first=place, start=place, end=place),
        ]
        return place if backend.restore(sequence_id, slices, None, spans_before(spans, place)) else 0

    def forget_behind(self, length: int) -> None:
        """Forget the states of more than ``length`` tokens."""
        self._states = {place: state for place, state in self._states.items() if place <= length}
