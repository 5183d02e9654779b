"""Prefixes that shards keep of ended sequences, for later prompts that begin alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The tokens of one ended sequence.

    ``cells``: KV cells that no other sequence holds, so that evicting this one alone frees them. ``tenant``: name of
    the tenant whose requests may use it, ``adapter``: "" for none. ``last_used_s``: when the sequence ended or another
    last started from it, in seconds on ``time.monotonic``.
    """

    tokens: int
    cells: int
    tenant: str
    adapter: str
    last_used_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPrefixes:
    """Prefixes on one shard, least recently used first. Evicting all of them frees ``cells`` KV cells.

    ``memory_bytes`` and ``disk_bytes``: size of the prefixes that are saved outside the cells.
    """

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    prefixes: tuple[CachedPrefix, ...]
