"""Replies of the routes for operators."""

import msgspec


class CachedPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of one ended sequence.

    ``cells``: KV cells that evicting this prefix alone would free; cells that other sequences share do not count.
    ``tenant``: name of the API key whose requests may use it, null without API keys. ``idle_s``: seconds since the
    sequence ended or another last started from it.
    """

    tokens: int
    cells: int
    tenant: str | None
    adapter: str | None
    idle_s: float


class ShardPrefixes(msgspec.Struct, frozen=True, kw_only=True):
    """Prefixes on one shard, the least recently used first. Together they hold ``cells`` KV cells.

    ``memory_bytes`` and ``disk_bytes``: size of the prefixes that are saved in host memory and on disk.
    """

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    prefixes: list[CachedPrefix]


class CachedPrefixes(msgspec.Struct, frozen=True):
    """Prefixes by shard."""

    shards: list[ShardPrefixes]
