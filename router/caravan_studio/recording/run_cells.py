"""The tokens of saved runs with cells of media, whose notes do not have them, so that their keys can be made again."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from caravan_proto.messages.commands import Save
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.recording.names import Names

# Most cuts whose runs are remembered. Most of them have 16 tokens, of 8 bytes each.
_MOST_CUTS = 1 << 16


class RunCells:
    """Remembers them from the moment when they are saved, with the numbers that the recording has for them."""

    def __init__(self) -> None:
        # By the key of each cut: the tokens of the run, and how many of them are before the cut. Least recently saved
        # first.
        self._by_cut: OrderedDict[bytes, tuple[array[int], int]] = OrderedDict()

    def note(self, command: Save, scheduler: Scheduler, names: Names) -> None:
        """Remember the tokens of what ``command``, which was just sent, saves."""
        shard = scheduler.shards.get(command.shard)
        begun = None if shard is None else shard.commands.find(command.command_id)
        if begun is None:
            return
        for entry in command.entries:
            if not entry.is_state and not entry.own_note.tokens:
                sequence = begun.residents[entry.sequence_id].sequence
                self._note(names.tokens(sequence.tokens(entry.start, entry.end)), entry.start, entry.cuts)

    def _note(self, tokens: Sequence[int], start: int, cuts: Iterable[tuple[int, bytes]]) -> None:
        shared = array("q", tokens)
        for position, key in cuts:
            known = self._by_cut.get(key)
            if known is None or known[1] < position - start:
                self._by_cut[key] = shared, position - start
            self._by_cut.move_to_end(key)
        while len(self._by_cut) > _MOST_CUTS:
            self._by_cut.popitem(last=False)

    def of(self, start: int, cuts: Sequence[tuple[int, bytes]]) -> list[int]:
        """Return the tokens of the run from ``start`` with these cuts; empty if its note has them, or none is known."""
        end, key = cuts[-1]
        tokens, known = self._by_cut.get(key, ((), 0))
        return list(tokens[known - (end - start) : known]) if 0 < end - start <= known else []
