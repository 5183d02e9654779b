"""The sequences and cells of an executor's conversations: who holds them, who gets them, who gives way."""

from collections.abc import Iterable

from caravan.conversation import Conversation
from caravan.executor_media import ExecutorMedia
from caravan.unloading import Restored, Unloading
from caravan_proto.messages.limits import Saving
from caravan_shard.backends.base import Backend


class ExecutorCells:
    """Gives sequences of the backend to conversations, and takes them back.

    ``free_ids``: the sequences that no conversation has. ``unloading``: None if no conversation gives way by itself.
    """

    def __init__(self, backend: Backend, media: ExecutorMedia, unloading: Unloading | None) -> None:
        self._backend, self._media, self.unloading = backend, media, unloading
        self.free_ids = list(range(backend.capacity.max_sequences))

    @property
    def saving(self) -> Saving:
        """How cells can be saved."""
        return self._backend.capacity.current.saving

    def use(self, conversations: Iterable[Conversation]) -> None:
        """Note that these were made, or took part in a step."""
        if self.unloading is not None:
            self.unloading.use(conversations)

    def share(self, source: Conversation, target: Conversation) -> None:
        """Let ``target``, which holds nothing, hold what ``source`` holds, if there is a sequence for it."""
        if source.sequence_id is None or not source.held:
            if self.unloading is not None:
                self.unloading.share(source, target)
            return
        if self.free_ids or self.give_way(beside=source):
            target.sequence_id, target.held = self.free_ids.pop(0), source.held
            self._backend.copy(source.sequence_id, target.sequence_id, source.held)
            self.note_cut_place(source)
            target.cut_places = source.cut_places.copy()

    def find_place(self, conversation: Conversation, taken: int) -> bool:
        """Let there be a free sequence beside those ``taken`` for it, and let it have the cells that are kept of it.

        Return False if there is no sequence, or no room for the cells.
        """
        if taken == len(self.free_ids) and not self.give_way():
            return False
        if self.unloading is None:
            return True
        restored = self.unloading.restore(conversation, self.free_ids[0], self.give_way)
        if restored is Restored.CELLS:
            del self.free_ids[0]
        return restored is not Restored.NO_ROOM

    def give_way(self, beside: Conversation | None = None) -> bool:
        """Unload a conversation that is idle, not ``beside``, if the executor does so; say whether there was one."""
        idle = None if self.unloading is None else self.unloading.next_idle(beside)
        if idle is not None:
            self.unload(idle)
        return idle is not None

    def make_way(self) -> Conversation | None:
        """Unload one of those that wait, where none of them can go on, and return it; None if it is not one of two.

        The one that holds most stays, so that it gets on even if all that the others hold is computed again.
        """
        by_use = () if self.unloading is None else self.unloading.by_use
        holders = [one for one in by_use if one.sequence_id is not None]
        if len(holders) < 2:
            return None
        least = min(holders, key=lambda one: one.held)
        self.unload(least)
        return least

    def unload(self, conversation: Conversation) -> None:
        """Free the cells of the conversation. Keep a copy of them in host memory if the executor does so."""
        if self.unloading is not None:
            self.unloading.keep(conversation)
        self.trim(conversation, 0)

    def forget(self, conversation: Conversation) -> None:
        """Free the cells of a conversation that has ended."""
        self.trim(conversation, 0)
        if self.unloading is not None:
            self.unloading.forget(conversation)

    def note_cut_place(self, conversation: Conversation) -> None:
        """Let it be cut back to where it is now, if it can be cut nowhere."""
        if self.saving is Saving.WITH_STATE and conversation.sequence_id is not None:
            conversation.cut_places.note(self._backend, conversation.sequence_id)

    def trim(self, conversation: Conversation, length: int) -> None:
        """Let the conversation hold its first ``length`` tokens at most; fewer if the cache cannot be cut there."""
        sequence_id = conversation.sequence_id
        if sequence_id is None:
            return
        length = min(length, conversation.held)
        if self._backend.length(sequence_id) > length and not self._backend.trim(sequence_id, length):
            spans = self._media.spans(conversation.tokens[:length])
            length = conversation.cut_places.cut(self._backend, sequence_id, length, spans)
        conversation.cut_places.forget_behind(length)
        conversation.note_held(length)
        if not length:
            self.free_ids.append(sequence_id)
            conversation.sequence_id = None
