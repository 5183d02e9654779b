"""Prefixes that shards keep of ended sequences, for later prompts that begin alike."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """The tokens of an ended sequence, as far as they were computed.

    ``key`` stands for the tokens, for those who may use them, and for the adapter: equal on all shards of a model, and
    after a restart. ``tokens``: length. ``cells``: KV cells that no other prefix or sequence holds, so that evicting
    this one alone frees them. ``memory_bytes``, ``disk_bytes``: size of what is saved of it beyond the saved prefixes
    that it begins with. ``tenant``: name of the tenant whose requests may use it, ``adapter``: "" for none.
    ``last_used_s``: when the sequence ended or another last started from it, in seconds on ``time.monotonic``.
    ``pinned``: what is saved of it does not make way for others.
    """

    key: bytes
    tokens: int
    cells: int
    tenant: str
    adapter: str
    last_used_s: float
    memory_bytes: int = 0
    disk_bytes: int = 0
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A sequence that starts or runs. The first ``tokens`` of it are in the cache.

    ``request_id``: that of its HTTP request, "" if there is none.
    """

    request_id: str
    tenant: str
    adapter: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPrefixes:
    """Prefixes on one shard, least recently used first. Evicting all that it has frees ``cells`` KV cells.

    ``memory_bytes`` and ``disk_bytes``: size of all prefixes that are saved outside the cells, ``pinned_bytes`` of
    those that are pinned. ``running``: empty in a report of what was evicted. ``model_tag``: 8 hexadecimal digits that
    stand for the model.
    """

    shard: str
    cells: int
    memory_bytes: int
    disk_bytes: int
    prefixes: tuple[CachedPrefix, ...]
    pinned_bytes: int = 0
    running: tuple[RunningSequence, ...] = ()
    model_tag: str = ""

    def id_of(self, prefix: CachedPrefix) -> str:
        """Return the id by which operators name a prefix."""
        return self.model_tag + prefix.key.hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """One prefix, of ``tokens`` tokens, of the model of this name.

    ``places``: the shards that have it, each with what it has; a pinned prefix may be on none. ``token_ids``: None if
    they are not known. The other fields are those of `CachedPrefix`.
    """

    prefix_id: str
    model: str
    tokens: int
    tenant: str
    adapter: str
    pinned: bool
    places: tuple[tuple[str, CachedPrefix], ...]
    token_ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRefusal:
    """All pinned prefixes together would take ``needed_bytes`` of a shard, which may use ``limit_bytes`` for them."""

    limit_bytes: int
    needed_bytes: int
