"""Describes shards and their cached prefixes to operators."""

import time
from collections.abc import Iterable
from typing import Any

from caravan_dialects.api.admin.schema import (
    CachedPrefix,
    CachedPrefixes,
    LoadedAdapter,
    Prefix,
    PrefixContent,
    PrefixPlace,
    RunningSequence,
    Shard,
    ShardLimits,
    ShardNumerics,
    ShardPrefixes,
    ShardSpeculation,
)
from caravan_proto.messages.adapters import adapter_name
from caravan_proto.messages.model import Numerics
from caravan_scheduler.core import prefixes as core
from caravan_scheduler.core.shards import ShardReport, ShardRoom


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
                    adapter=adapter_name(sequence.adapter) or None,
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
        adapter=adapter_name(prefix.adapter) or None,
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
        "adapter": adapter_name(report.adapter) or None,
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


def shard_of(report: ShardReport, now: float, speculate: int) -> Shard:
    """Describe a shard as it is ``now``. ``speculate``: most draft tokens of a sequence in one step."""
    standing, room = report.standing, report.room
    return Shard(
        address=report.address,
        state=standing.state,
        state_s=round(now - standing.since_s, 3),
        reason=standing.reason or None,
        next_try_s=None if standing.next_try_s is None else round(max(0.0, standing.next_try_s - now), 3),
        epoch=report.epoch,
        shard_id=report.shard_id or None,
        version=report.version or None,
        model=report.model or None,
        model_fingerprint=report.model_fingerprint or None,
        limits=None
        if room is None
        else ShardLimits(
            max_sequences=room.max_sequences,
            max_batch_tokens=room.max_batch_tokens,
            cells=room.cells,
            cells_per_sequence=room.cells_per_sequence,
        ),
        layout=None if room is None else "unified" if room.unified else "split",
        speculation=None if room is None else _speculation(room, speculate),
        numerics=None if report.numerics is None else _numerics(report.numerics, room),
        sequences=report.sequences,
        used_cells=report.used_cells,
        adapters=[
            LoadedAdapter(name=adapter_name(adapter.key), size_bytes=adapter.size_bytes) for adapter in report.adapters
        ],
    )


def _numerics(found: Numerics, room: ShardRoom | None) -> ShardNumerics:
    # The shard says what holds in its first layout, and may have changed it since.
    is_unified = room is not None and room.unified
    return ShardNumerics(
        fingerprint=found.fingerprint,
        exact=found.exact,
        flash_attention=dict(found.flash_attention),
        same_in_company=False if is_unified and found.same_in_company and not found.exact else found.same_in_company,
        same_in_chunks=found.same_in_chunks,
        kernels=None if found.kernels is None else found.kernels.value,
    )


def _speculation(room: ShardRoom, speculate: int) -> ShardSpeculation:
    reason = None
    if speculate == 0:
        reason = "the router has --speculate 0"
    elif room.draft_tokens == 0:
        reason = "the memory of its sequences cannot be cut back (see the shard's --rollback-tokens)"
    return ShardSpeculation(
        max_draft_tokens=0 if reason else room.draft_tokens,
        off_because=reason,
        equal_lengths=not room.unified,
    )
