"""One model of the catalogue."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """How a model is loaded.

    ``source``: a GGUF file, or a repository as `caravan serve` takes it. ``flags``: of its shards, beside those of the
    command. ``pinned``: loaded at the start, and unloaded only if an operator asks. ``memory_bytes``: what it takes, if
    the estimate is not to be used. ``idle_s``: seconds without requests after which it is unloaded.
    ``is_pulled``: it is of the hub's cache, and goes when it is removed there.
    """

    name: str
    source: str
    aliases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    pinned: bool = False
    memory_bytes: int | None = None
    idle_s: float = math.inf
    is_pulled: bool = False
