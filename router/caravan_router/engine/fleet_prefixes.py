"""The cached prefixes of all models of a router."""

import asyncio
from collections.abc import Collection

from caravan_router.engine.batcher import Batcher
from caravan_router.engine.model_prefixes import ModelPrefixes
from caravan_scheduler.core.prefixes import PinRefusal, PrefixReport, ShardPrefixes


class FleetPrefixes:
    """Asks the engine that has a prefix. ``batchers``: those of the known models, which come and go."""

    def __init__(self, batchers: Collection[Batcher]) -> None:
        self._batchers = batchers

    def cached_prefixes(self) -> list[ShardPrefixes]:
        """Return what each leased shard keeps of ended sequences."""
        return [prefixes for batcher in self._batchers for prefixes in batcher.prefixes.cached_prefixes()]

    async def flush_prefixes(self, shards: Collection[str]) -> list[ShardPrefixes]:
        """Evict all that ``shards`` keep of ended sequences, and return it. Shards that are not leased are left out."""
        models = [batcher.prefixes for batcher in self._batchers]
        flushed = await asyncio.gather(*(prefixes.flush_prefixes(shards) for prefixes in models))
        return [prefixes for of_model in flushed for prefixes in of_model]

    def find_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Return the prefix of this id; None if no shard has it and it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else found[0].find_prefix(found[1])

    async def drop_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Evict the prefix of this id from all shards, and pin it no longer. Return it as it was, if it was."""
        found = self._home_of(prefix_id)
        return None if found is None else await found[0].drop_prefix(found[1])

    def pins(self) -> list[PrefixReport]:
        """Return the pinned prefixes of all models, the first pinned of each first."""
        return [report for batcher in self._batchers for report in batcher.prefixes.pins()]

    async def pin_prefix(self, prefix_id: str) -> PrefixReport | PinRefusal | None:
        """Let a prefix stay that a shard has. Return it, or why not; None if no shard has it and it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else await found[0].pin_prefix(found[1])

    def unpin_prefix(self, prefix_id: str) -> PrefixReport | None:
        """Let a prefix make way for others again, and return it; None if it is not pinned."""
        found = self._home_of(prefix_id)
        return None if found is None else found[0].unpin_prefix(found[1])

    def _home_of(self, prefix_id: str) -> tuple[ModelPrefixes, bytes] | None:
        """Return the prefixes of the model that has such ids, and the key of the prefix there; None if none has."""
        keys = ((batcher.prefixes, batcher.prefixes.key_of(prefix_id)) for batcher in self._batchers)
        return next(((prefixes, key) for prefixes, key in keys if key is not None), None)
