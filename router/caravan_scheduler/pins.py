"""The prefixes that operators pinned: what is saved of them does not make way for others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from caravan_scheduler.prefix_keys import PrefixKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A pinned prefix of ``length`` tokens, named by its ``key``.

    ``tokens``: all of its tokens; empty if they are not known. ``tenant``, ``adapter``: as in `RunNote`.
    ``namespace``: see `Request.prefix_namespace`; None if it is not known.
    """

    key: bytes
    length: int
    tokens: Sequence[int]
    tenant: str
    adapter: str
    namespace: str | None = None


class Pins:
    """The pins of a scheduler, which it writes and the ledgers of its shards read. The first pinned comes first."""

    def __init__(self) -> None:
        self._pins: dict[bytes, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def get(self, key: bytes) -> Pin | None:
        """Return the pin of the prefix that ``key`` names; None if it is not pinned."""
        return self._pins.get(key)

    def add(self, pin: Pin) -> None:
        """Pin a prefix, or leave it pinned."""
        self._pins.setdefault(pin.key, pin)

    def remove(self, key: bytes) -> None:
        """Let a prefix be pinned no longer."""
        self._pins.pop(key, None)

    def within(self, keys: PrefixKeys, known: int) -> list[Pin]:
        """Return the pins that ``known`` tokens begin with, the shortest first."""
        found = [pin for pin in self._pins.values() if pin.length <= known and keys.at(pin.length) == pin.key]
        return sorted(found, key=lambda pin: pin.length)
