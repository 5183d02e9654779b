"""Which model to load and which to unload next."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

# The place of memory that is on no device, in mappings from places to bytes.
HOST = "host"
# An age of 0 would make a model that was used just now infinitely dear.
_LEAST_AGE_S = 1.0
# The requests for which a model was loaded are rendered and tokenized before they wait for a place on a shard.
_ARRIVING_S = 1.0


class Phase(Enum):
    """Where a model is. The values are those that llama-server's router has for them."""

    COLD = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """A model, what it takes, and who wants it. Times are in seconds, on one clock.

    ``since_s``: when its phase began. ``bytes_at``: memory that it takes, or would take, by place. ``load_s``: how long
    loading it takes. ``wanted_since_s``: since when a request, or an operator, has waited for it; None if nobody does.
    ``is_busy``: whether a request of it waits or runs. ``used_s``: when it was last busy. ``keep_s``: how long it stays
    without requests while nobody needs its place. ``is_pinned``: it leaves only if it is asked to.
    """

    name: str
    phase: Phase
    since_s: float
    bytes_at: Mapping[str, int] = field(default_factory=dict)
    load_s: float = 0.0
    wanted_since_s: float | None = None
    is_busy: bool = False
    used_s: float = 0.0
    keep_s: float = math.inf
    is_pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What loaded models may take.

    ``free_at``: bytes that are free now, by place; a place that is missing has no bound. ``max_models``: most
    models that are in memory at a time; None for no bound.
    """

    free_at: Mapping[str, int] = field(default_factory=dict)
    max_models: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model, for which there is room."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Let what runs on a model end, and unload it. What waits goes on waiting."""

    name: str


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Tell those who wait for a model that it cannot be loaded: it would not fit if all that may leave had left."""

    name: str
    place: str
    needs_bytes: int
    most_bytes: int


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Tell those who wait for a model that it cannot be loaded: as many as may be loaded at a time are pinned."""

    name: str
    max_models: int


Refusal = TooLarge | NoPlace
Step = Load | Unload | Refusal


def plan(models: Sequence[ModelNeed], room: Room, turn_s: float, now: float) -> list[Step]:
    """Return what to do next; nothing while a model is loading or unloading, so that two never take the same memory.

    - The model that has been wanted for longest is loaded first. Another one is loaded before it only into room that is
      free already.
    - Models without requests leave first: those that cost little to load again and were not used for long. One that was
      just loaded is left a second for those who wanted it to arrive.
    - A model with requests leaves when another one has waited for ``turn_s`` seconds since both were there to compete,
      and at least as long as loading it took, so that no more than half of the time goes to loads. Requests of one
      model are thus collected while another has its turn, and with ``n`` models nobody is overtaken for longer than
      ``n - 1`` turns and loads, and what ends meanwhile.
    """
    if any(model.phase in (Phase.LOADING, Phase.UNLOADING) for model in models):
        return []
    loaded = [model for model in models if model.phase is Phase.LOADED]
    wanted = sorted(
        (model for model in models if model.phase is Phase.COLD and model.wanted_since_s is not None),
        key=lambda model: (model.wanted_since_s, model.name),
    )
    refused = [refusal for model in wanted if (refusal := _refusal(model, loaded, room)) is not None]
    if refused:
        return list(refused)
    for model in wanted:
        if _fits(model, room, loaded, ()):
            return [Load(model.name)]
    for model in wanted:
        if leaving := _who_leaves(model, loaded, room, turn_s, now):
            return [Unload(other.name) for other in leaving]
    return [Unload(model.name) for model in loaded if _has_been_idle(model, now)]


def _refusal(model: ModelNeed, loaded: Sequence[ModelNeed], room: Room) -> Refusal | None:
    staying = [other for other in loaded if other.is_pinned]
    if room.max_models is not None and len(staying) >= room.max_models:
        return NoPlace(model.name, room.max_models)
    freed = _sum(other for other in loaded if not other.is_pinned)
    for place, needed in model.bytes_at.items():
        if place in room.free_at and needed > (most := room.free_at[place] + freed[place]):
            return TooLarge(model.name, place, needed, most)
    return None


def _who_leaves(
    model: ModelNeed, loaded: Sequence[ModelNeed], room: Room, turn_s: float, now: float
) -> list[ModelNeed]:
    """Return the models that leave for ``model``, the least valuable that make room enough; none if it has to wait."""
    able = [other for other in loaded if _may_leave(other, model, turn_s, now)]
    able.sort(key=lambda other: (other.is_busy, other.load_s / max(_LEAST_AGE_S, now - other.used_s), other.name))
    leaving: list[ModelNeed] = []
    for other in able:
        if _fits(model, room, loaded, leaving):
            break
        leaving.append(other)
    if not _fits(model, room, loaded, leaving):
        return []
    for other in list(leaving[:-1]):  # Those that turn out not to be needed stay.
        others = [one for one in leaving if one is not other]
        if _fits(model, room, loaded, others):
            leaving = others
    return leaving


def _may_leave(other: ModelNeed, model: ModelNeed, turn_s: float, now: float) -> bool:
    if other.is_pinned or model.wanted_since_s is None:
        return False
    together_s = now - max(other.since_s, model.wanted_since_s)
    is_idle = not other.is_busy and now - other.since_s >= _ARRIVING_S
    return is_idle or together_s >= max(turn_s, other.load_s)


def _fits(model: ModelNeed, room: Room, loaded: Sequence[ModelNeed], leaving: Sequence[ModelNeed]) -> bool:
    if room.max_models is not None and len(loaded) - len(leaving) >= room.max_models:
        return False
    freed = _sum(leaving)
    return all(
        needed <= room.free_at[place] + freed[place]
        for place, needed in model.bytes_at.items()
        if place in room.free_at
    )


def _sum(models: Iterable[ModelNeed]) -> Counter[str]:
    total: Counter[str] = Counter()
    for model in models:
        total.update(model.bytes_at)
    return total


def _has_been_idle(model: ModelNeed, now: float) -> bool:
    idle_s = now - max(model.used_s, model.since_s)
    return not (model.is_pinned or model.is_busy) and idle_s >= model.keep_s
