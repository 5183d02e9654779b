"""What the plan knows of each model that can be loaded."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# The place of memory that is on no device, in mappings from places to bytes.
HOST = "host"


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
