"""What a shard is going to need of the memory of its host and of each device, and whether that is free."""

from collections.abc import Mapping
from dataclasses import dataclass, field

HOST = "host"
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one kind in one place: the name of a device, or `HOST`."""

    place: str
    what: str
    size: int


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """All that a shard takes once it serves, but for saved prefixes, which take what is left."""

    parts: tuple[Part, ...] = ()

    def __add__(self, other: "MemoryNeed") -> "MemoryNeed":
        return MemoryNeed((*self.parts, *other.parts))

    @property
    def places(self) -> dict[str, int]:
        """Bytes by place."""
        return {place: sum(parts.values()) for place, parts in self.by_place.items()}

    @property
    def by_place(self) -> dict[str, dict[str, int]]:
        """Bytes by place and kind, without those that are zero. The host comes first and is always there."""
        found: dict[str, dict[str, int]] = {HOST: {}}
        for part in self.parts:
            if part.size:
                kinds = found.setdefault(part.place, {})
                kinds[part.what] = kinds.get(part.what, 0) + part.size
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Bytes that are free. ``host``: None if it does not say."""

    host: int | None
    devices: Mapping[str, int] = field(default_factory=dict)

    def of(self, place: str) -> int | None:
        """Return the bytes that are free in a place; None if that is unknown."""
        return self.host if place == HOST else self.devices.get(place)


def shortage(model: str, need: MemoryNeed, free: FreeMemory, *, taken: int = 0) -> str | None:
    """Return in one line what does not fit and what to do; None if all fits.

    ``taken``: bytes of the host that this process has already, so that they are not free any more.
    """
    for place, size in need.places.items():
        room = free.of(place)
        missing = size - (taken if place == HOST else 0)
        if room is not None and missing > room:
            kinds = sorted(need.by_place[place].items(), key=lambda kind: -kind[1])
            listed = ", ".join(f"{what.replace('_', ' ')} {in_words(bytes_)}" for what, bytes_ in kinds)
            where = "the host's memory" if place == HOST else f"{place}'s memory"
            return (
                f"{model} needs {in_words(missing)} of {where} ({listed}), and {in_words(room)} are free: pass "
                f"{_advice(place, need)}, or --allow-overcommit to start nevertheless"
            )
    return None


def _advice(place: str, need: MemoryNeed) -> str:
    cells = "a smaller -c, or -ctk q8_0 -ctv q8_0"
    if place != HOST:
        return f"fewer -ngl, a larger -ncmoe, {cells}, or leave them out, so that --fit chooses"
    kinds = need.by_place[HOST]
    return (
        cells if kinds.get("cells", 0) > kinds.get("mapped_weights", 0) else f"a file of fewer bits per weight, {cells}"
    )


def in_words(size: int) -> str:
    """Return a number of bytes for people, in GiB or MiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{-(-size // _MIB)} MiB"
