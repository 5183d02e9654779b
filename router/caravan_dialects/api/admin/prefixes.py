"""Describes cached prefixes to operators."""

import time
from collections.abc import Iterable
from typing import Any

from caravan_dialects.api.admin.schema import (
    CachedPrefix,
    CachedPrefixes,
    Prefix,
    PrefixContent,
    PrefixPlace,
    RunningSequence,
    ShardPrefixes,
)
from caravan_scheduler.core import prefixes as core


def cached_prefixes(found: Iterable[core.ShardPrefixes], pins: Iterable[core.PrefixReport]) -> CachedPrefixes:
    """Describe what shards hold, and all pinned prefixes."""
    now = time.monotonic()
    shards = [
        ShardPrefixes(
            shard=one.shard,
            cells=one.cells,
            memory_bytes=one.memory_bytes,
            disk_bytes=one.disk_bytes,
            pinned_bytes=one.pinned_bytes,
            prefixes=[_cached_prefix(one.id_of(prefix), prefix, now) for prefix in one.prefixes],
            running=[
                RunningSequence(
                    request_id=sequence.request_id,
                    tokens=sequence.tokens,
                    tenant=sequence.tenant or None,
                    adapter=sequence.adapter or None,
                )
                for sequence in one.running
            ],
        )
        for one in found
    ]
    return CachedPrefixes(shards, pins=[prefix_of(pin) for pin in pins])


def _cached_prefix(prefix_id: str, prefix: core.CachedPrefix, now: float) -> CachedPrefix:
    return CachedPrefix(
        id=prefix_id,
        tokens=prefix.tokens,
        cells=prefix.cells,
        memory_bytes=prefix.memory_bytes,
        disk_bytes=prefix.disk_bytes,
        tenant=prefix.tenant or None,
        adapter=prefix.adapter or None,
        idle_s=_idle_s(prefix, now),
        pinned=prefix.pinned,
    )


def _idle_s(prefix: core.CachedPrefix, now: float) -> float:
    return round(max(0.0, now - prefix.last_used_s), 3)


def prefix_of(report: core.PrefixReport) -> Prefix:
    """Describe a prefix and the shards that have it."""
    return Prefix(**_fields(report))


def content_of(report: core.PrefixReport, text: str | None) -> PrefixContent:
    """Describe a prefix with its tokens, as far as they are known, and their ``text``."""
    token_ids = None if report.token_ids is None else list(report.token_ids)
    return PrefixContent(**_fields(report), token_ids=token_ids, text=text)


def _fields(report: core.PrefixReport) -> dict[str, Any]:
    """Return the fields of a `Prefix`."""
    now = time.monotonic()
    return {
        "id": report.prefix_id,
        "model": report.model,
        "tokens": report.tokens,
        "tenant": report.tenant or None,
        "adapter": report.adapter or None,
        "pinned": report.pinned,
        "shards": [
            PrefixPlace(
                shard=shard,
                cells=prefix.cells,
                memory_bytes=prefix.memory_bytes,
                disk_bytes=prefix.disk_bytes,
                idle_s=_idle_s(prefix, now),
            )
            for shard, prefix in report.places
        ],
    }
