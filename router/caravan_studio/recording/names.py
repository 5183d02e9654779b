"""Other names for what a recording must not tell. Decisions depend on which things are equal, and on nothing else."""

from collections.abc import Callable, Iterable

from caravan_scheduler.core.prompt_media import FIRST_CELL_NUMBER
from caravan_scheduler.prefix_keys import PrefixKeys


class _Numbers(dict[int, int]):
    """Numbers for tokens, in the order in which they appear. Those of cells of media stay above all token ids."""

    def __missing__(self, token: int) -> int:
        number = self[token] = len(self) + (FIRST_CELL_NUMBER if token >= FIRST_CELL_NUMBER else 0)
        return number


class _CellNumbers(_Numbers):
    """Numbers for the cells of media alone: they are made of what is in a medium."""

    def __missing__(self, token: int) -> int:
        return super().__missing__(token) if token >= FIRST_CELL_NUMBER else token


class Names:
    """Numbers the tokens, media, keys of prefixes, API keys, namespaces and constraints of one recording.

    A number means the same in the whole recording, and nothing outside of it. ``keeps_tokens``: the tokens stay as they
    are, so that texts can be read, but for cells of media.
    """

    def __init__(self, *, keeps_tokens: bool = False) -> None:
        self._tokens: _Numbers = _CellNumbers() if keeps_tokens else _Numbers()
        # Ids of media and fingerprints of their encoders. None has no number but 0.
        self._media: dict[bytes, int] = {b"": 0}
        self._keys: dict[bytes, int] = {}
        # How many numbers of keys were given in this part.
        self.keys = 0
        # The number of the key that all prefixes of a namespace begin with, by namespace.
        self._roots: dict[str, int] = {}
        self._tenants: dict[str, str] = {"": ""}
        self._constraints: dict[object, int] = {}

    def begin_part(self) -> None:
        """Forget the numbers of keys: another part of the recording tells of those that there are then."""
        self._keys.clear()
        self._roots.clear()
        self.keys = 0

    def token(self, token: int) -> int:
        """Return the number of a token."""
        return self._tokens[token]

    def tokens(self, tokens: Iterable[int]) -> list[int]:
        """Return the numbers of tokens."""
        numbers = self._tokens
        return [numbers[token] for token in tokens]

    def medium(self, media_id: bytes) -> int:
        """Return the number of a medium, or of an encoder by its fingerprint."""
        return self._media.setdefault(media_id, len(self._media))

    def key(self, key: bytes) -> int:
        """Return the number of the key of a prefix, a new one if it is new."""
        if (number := self._keys.get(key)) is None:
            number = self._keys[key] = self.keys
            self.keys += 1
        return number

    def forget_key(self, key: bytes) -> None:
        """Give the key a new number when it comes again: nothing tells any more which tokens it stands for."""
        self._keys.pop(key, None)

    def forget_unknown(self, knows: Callable[[int], bool]) -> None:
        """Give new numbers to keys of which a state does not tell what they stand for, such as those just dropped."""
        roots = set(self._roots.values())
        for key in [key for key, number in self._keys.items() if number not in roots and not knows(number)]:
            del self._keys[key]

    def knows_key(self, key: bytes) -> bool:
        """Whether the key has a number."""
        return key in self._keys

    def root(self, namespace: str) -> int:
        """Return the number of the key that all prefixes of `Request.prefix_namespace` begin with."""
        if (number := self._roots.get(namespace)) is None:
            number = self._roots[namespace] = self.key(PrefixKeys(namespace, _no_tokens).at(0))
        return number

    @property
    def roots(self) -> list[tuple[bytes, int]]:
        """The keys of the empty prefixes of namespaces, with their numbers."""
        return [(key, number) for key, number in self._keys.items() if number in self._roots.values()]

    def tenant(self, name: str) -> str:
        """Return another name for an API key."""
        return self._tenants.setdefault(name, f"key-{len(self._tenants)}")

    def constraint(self, constraint: object) -> int:
        """Return the number of a constraint."""
        return self._constraints.setdefault(constraint, len(self._constraints) + 1)


def _no_tokens(_start: int, _stop: int) -> tuple[int, ...]:
    return ()
