"""Saved and pinned prefixes whose keys a player cannot make before a request with them tells their tokens."""

from collections.abc import Callable, Iterable

from caravan_scheduler.events import SavedRun
from caravan_scheduler.pins import Pin
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_studio.recording.names import Names


class UntoldKeys:
    """Their beginning was gone when the shard joined, or there are media among their tokens."""

    def __init__(self) -> None:
        # The number that a line has for each key, by the length of the prefix.
        self._numbers: dict[int, dict[bytes, int]] = {}

    def note(self, runs: Iterable[SavedRun], names: Names, knows: Callable[[int], bool]) -> None:
        """Note the keys of ``runs``, which a line has named. ``knows``: whether a player knows what a number means."""
        for run in runs:
            # The key of a recurrent state is made of that of its prefix.
            cuts = () if run.start == run.cuts[-1][0] else run.cuts
            for length, key in ((run.start, run.note.before), *cuts):
                self._note(length, key, names, knows)

    def note_pins(self, pins: Iterable[Pin], names: Names, knows: Callable[[int], bool]) -> None:
        """Note the keys of ``pins``: that of a saved prefix may be pinned when no token of it is known."""
        for pin in pins:
            self._note(pin.length, pin.key, names, knows)

    def _note(self, length: int, key: bytes, names: Names, knows: Callable[[int], bool]) -> None:
        if not knows(number := names.key(key)):
            self._numbers.setdefault(length, {})[key] = number

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def take(self, keys: PrefixKeys, lengths: range) -> list[tuple[int, int]]:
        """Return the lengths, within ``lengths``, and numbers of prefixes of a sequence, and forget them."""
        taken = []
        # Of a sequence that grows, there is one length at a time.
        few, many = sorted((lengths, self._numbers), key=len)
        for length in sorted(length for length in few if length in many):
            number = self._numbers[length].pop(keys.at(length), None)
            if number is not None:
                taken.append((length, number))
            if not self._numbers[length]:
                del self._numbers[length]
        return taken

    def clear(self) -> None:
        """Forget them: another part of the recording begins."""
        self._numbers.clear()
