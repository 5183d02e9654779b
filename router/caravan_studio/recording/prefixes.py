"""The keys of prefixes when a recording is played again: the scheduler makes them of other tokens, so they differ."""

from collections.abc import Callable, Iterable

from caravan_scheduler.prefix_keys import PrefixKeys, state_key
from caravan_studio.recording.events import SavedCells
from caravan_studio.recording.lines import Told

# What keys begin with that nobody has.
_UNKNOWN = b"unknown"


def namespace_of(root: int) -> str:
    """Return the namespace, without adapter, that a recording's number of an empty prefix stands for."""
    return f"n{root}"


def root_of(namespace: str) -> int:
    """Return the number for which `namespace_of` returns ``namespace``. Raises ValueError."""
    return int(namespace.removeprefix("n"))


def with_adapter(namespace: str, adapter: str) -> str:
    """Return `Request.prefix_namespace`."""
    return f"{adapter}\n{namespace}" if adapter else namespace


class PlayedKeys:
    """Which key has which number in the recording.

    Those that the scheduler makes get the next number when they are seen first, as they did when it was recorded. Those
    of runs that shards had saved before are made of the tokens in their notes.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # The tokens of prefixes that end in or behind a saved run, each with its namespace, by number.
        self._prefixes: dict[int, tuple[str, tuple[int, ...]]] = {}
        # The same for those of which only a later line tells.
        self._foretold: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._next = 0
        # How many saved runs have keys that could not be made of tokens, so that nobody starts from them.
        self.unknown = 0

    def number(self, key: bytes) -> int:
        """Return the number of a key that the scheduler has made."""
        if (number := self._numbers.get(key)) is None:
            number = self._next
            self._note(number, key)
        return number

    def forget(self, key: bytes) -> None:
        """Give the key a new number when it comes again, as when it was recorded."""
        self._numbers.pop(key, None)

    def key(self, number: int) -> bytes:
        """Return the key of this number. One that nothing tells of is a key that nobody has."""
        if (key := self._keys.get(number)) is None:
            foretold = self._foretold.get(number)
            key = _UNKNOWN + number.to_bytes(9, "big") if foretold is None else prefix_key(*foretold)
            self._note(number, key)
        return key

    def foretell(self, told: Told) -> None:
        """Note what a later line will tell."""
        namespace, tokens = with_adapter(namespace_of(told.root), told.adapter), tuple(told.tokens)
        for length, number in told.keys:
            self._foretold.setdefault(number, (namespace, tokens[:length]))

    def forget_unknown(self, knows: Callable[[int], bool]) -> None:
        """Give keys new numbers, as `Names.forget_unknown` did."""
        for key in [key for key, number in self._numbers.items() if not knows(number)]:
            self.forget(key)

    def knows(self, number: int) -> bool:
        """Whether anything told of the key with this number."""
        return not self._keys.get(number, _UNKNOWN).startswith(_UNKNOWN)

    def note(self, number: int, key: bytes) -> None:
        """Note what the recording tells of a number."""
        if number not in self._keys:
            self._note(number, key)

    def reserve(self, count: int) -> None:
        """Note that the first ``count`` numbers are taken."""
        self._next = max(self._next, count)

    def _note(self, number: int, key: bytes) -> None:
        self._numbers[key], self._keys[number] = number, key
        self._next = max(self._next, number + 1)

    def note_root(self, root: int, adapter: str) -> None:
        """Note the key of an empty prefix, and that it is the root of a namespace."""
        if root not in self._prefixes:
            namespace = with_adapter(namespace_of(root), adapter)
            self._prefixes[root] = namespace, ()
            self.note(root, prefix_key(namespace, ()))

    def note_run(self, run: SavedCells) -> None:
        """Note the keys of the cuts of a saved run, which comes after the runs before it."""
        for number, _ in ((run.before, 0), *((number, 0) for _, number in run.cuts)):
            self._next = max(self._next, number + 1)
        if run.start == 0:
            self.note_root(run.before, run.adapter)
        known = self._prefixes.get(run.before) or self._foretold.get(run.before)
        end = max((position for position, _ in run.cuts), default=0)
        own = run.cells or run.tokens
        if known is None or len(known[1]) != run.start or len(own) != end - run.start:
            self.unknown += 1
            return
        namespace, before = known
        if not own:  # recurrent state
            self.note(run.cuts[-1][1], state_key(self.key(run.before)))
            return
        tokens = (*before, *own)
        keys = PrefixKeys(namespace, lambda start, stop: tokens[start:stop])
        for position, number in run.cuts:
            self._prefixes[number] = namespace, tokens[:position]
            self.note(number, keys.at(position))


def prefix_key(namespace: str, tokens: Iterable[int]) -> bytes:
    """Return the key of a prefix."""
    known = tuple(tokens)
    return PrefixKeys(namespace, lambda start, stop: known[start:stop]).at(len(known))
