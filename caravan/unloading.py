"""Lets idle conversations of an executor give way, and keeps their cells in host memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from caravan.conversation import Conversation, CutPlaces
from caravan.executor_media import ExecutorMedia
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import Saving
from caravan_scheduler.core.tokens import common_length
from caravan_shard.arrays import State
from caravan_shard.backends.base import Backend, CellSlice


class Restored(Enum):
    """What came back of a conversation: its cells, nothing as long as others need the room, or nothing at all."""

    CELLS = "cells"
    NO_ROOM = "no room"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class _Kept:
    """The cells of the first ``tokens`` of a conversation; ``state``: the recurrent state after all of them, if any."""

    tokens: list[int]
    cells: State
    state: State | None
    cut_places: CutPlaces

    @property
    def size(self) -> int:
        return self.cells.nbytes + (0 if self.state is None else self.state.nbytes)


class Unloading:
    """Says which conversation gives way, and has the cells of those that did, at most ``most_bytes`` of them.

    A conversation is idle if it holds cells and waits for no step. The one that was in a step longest ago goes first.
    """

    def __init__(self, backend: Backend, media: ExecutorMedia, most_bytes: int) -> None:
        self._backend, self._media, self._most_bytes = backend, media, most_bytes
        # All conversations, those whose last step is longest ago first; and what is kept of them.
        self._all: dict[Conversation, None] = {}
        self._kept: dict[Conversation, _Kept] = {}

    @property
    def by_use(self) -> Sequence[Conversation]:
        """All conversations, those whose last step is longest ago first."""
        return tuple(self._all)

    def use(self, conversations: Iterable[Conversation]) -> None:
        """Note that these were made, or took part in a step."""
        for conversation in conversations:
            self._all.pop(conversation, None)
            self._all[conversation] = None

    def forget(self, conversation: Conversation) -> None:
        """Note that the conversation has ended."""
        del self._all[conversation]
        self._kept.pop(conversation, None)

    def next_idle(self, beside: Conversation | None = None) -> Conversation | None:
        """Return the conversation that should give way next, not ``beside``; None if there is none."""
        idle = (one for one in self._all if one.sequence_id is not None and not one.waiting and one is not beside)
        return next(idle, None)

    def keep(self, conversation: Conversation) -> None:
        """Copy the cells of a conversation, which are released then, if there is room for them."""
        self._kept.pop(conversation, None)
        sequence_id, held, saving = conversation.sequence_id, conversation.held, self._backend.capacity.current.saving
        if sequence_id is None or not held or saving is Saving.NOTHING:
            return
        # The state comes first, since the cells may be changed when they are saved.
        state = self._save(sequence_id, held, held) if saving is Saving.WITH_STATE else None
        cells = self._save(sequence_id, 0, held)
        if cells is None or (state is None and saving is Saving.WITH_STATE):
            return
        kept = _Kept(conversation.tokens[:held], cells, state, conversation.cut_places.copy())
        self._make_room(kept.size)
        if kept.size <= self._most_bytes:
            self._kept[conversation] = kept

    def share(self, source: Conversation, target: Conversation) -> None:
        """Let a fork have what is kept of its source."""
        kept = self._kept.get(source)
        if kept is not None:
            self._make_room(kept.size)
            self._kept[target] = kept

    def _save(self, sequence_id: int, start: int, end: int) -> State | None:
        return self._backend.save(sequence_id, start, end, self._most_bytes, releasing=start == 0)

    def _make_room(self, size: int) -> None:
        """Forget the cells that were kept first, until ``size`` bytes more fit."""
        total = size + sum(kept.size for kept in self._kept.values())
        while self._kept and total > self._most_bytes:
            total -= self._kept.pop(next(iter(self._kept))).size

    def restore(self, conversation: Conversation, sequence_id: int, give_way: Callable[[], bool]) -> Restored:
        """Put what is kept, and is still of use, under a free ``sequence_id``.

        ``give_way`` makes room in the cache and says whether it could.
        """
        kept = self._kept.get(conversation)
        if kept is None:
            return Restored.NOTHING
        tokens = conversation.tokens
        # The tokens that wait for logits are computed.
        length = common_length(tokens[: conversation.first_output], kept.tokens)
        if length == 0 or (kept.state is not None and length < len(kept.tokens)):
            del self._kept[conversation]
            return Restored.NOTHING
        slices = [CellSlice(state=kept.cells, first=0, start=0, end=length)]
        if kept.state is not None:
            slices.append(CellSlice(state=kept.state, first=length, start=length, end=length))
        spans = self._media.spans(tokens[:length])
        while not self._backend.restore(sequence_id, slices, self._shared(conversation, length), spans):
            if not give_way():
                if any(one.sequence_id is not None for one in self._all):
                    return Restored.NO_ROOM
                del self._kept[conversation]
                return Restored.NOTHING
        del self._kept[conversation]
        conversation.sequence_id, conversation.held = sequence_id, length
        # A copy, since a fork may have the same.
        conversation.cut_places = kept.cut_places.copy()
        conversation.cut_places.forget_behind(length)
        return Restored.CELLS

    def _shared(self, conversation: Conversation, length: int) -> PrefixCopy | None:
        """Return which cells of another conversation are equal to most of the first ``length`` of this one."""
        tokens, best = conversation.tokens[:length], None
        for other in self._all:
            if other.sequence_id is not None:
                common = common_length(tokens, other.tokens[: other.held])
                if common > (0 if best is None else best.length):
                    best = PrefixCopy(source_id=other.sequence_id, length=common)
        return best
