"""What operators see of a shard: the prefixes that it keeps of ended sequences, and its running sequences."""

from collections.abc import Sequence

from caravan_scheduler.core.prefixes import CachedPrefix, RunningSequence, ShardPrefixes
from caravan_scheduler.core.prompt_media import is_cell
from caravan_scheduler.pins import Pin
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import KeptRun, Tier


def prefixes_of(shard: ShardAccount, key: bytes | None = None) -> ShardPrefixes:
    """Return what ``shard`` keeps of ended sequences, or of it the prefix that ``key`` names."""
    parked: dict[bytes, list[Resident]] = {}
    for resident in shard.stays.parked.values():
        parked.setdefault(resident.prefix_key, []).append(resident)
    saved = shard.runs.listed
    pinned = {pin.key: pin for pin in shard.runs.pins if shard.runs.holding(pin.key)}
    names = parked.keys() | saved.keys() | pinned.keys()
    found = []
    for name in names if key is None else names & {key}:
        if name in parked or name in saved:
            found.append(_prefix(shard, name, parked.get(name, ()), saved.get(name, ())))
        else:
            found.append(_part_of_longer(shard, pinned[name]))
    return ShardPrefixes(
        shard=shard.name,
        cells=shard.cells.held - shard.cells.live,
        memory_bytes=shard.runs.used_bytes[Tier.MEMORY],
        disk_bytes=shard.runs.used_bytes[Tier.DISK],
        pinned_bytes=sum(shard.runs.pinned.values()),
        prefixes=tuple(sorted(found, key=lambda prefix: (prefix.last_used_s, prefix.tokens, prefix.key))),
    )


def _prefix(shard: ShardAccount, key: bytes, parked: Sequence[Resident], runs: Sequence[KeptRun]) -> CachedPrefix:
    own_cells = shard.cells.tree.own_cells({resident.sequence_id for resident in parked})
    all_cells = sum(resident.computed for resident in parked)
    size = {tier: sum(run.size_bytes for run in runs if run.tier is tier) for tier in Tier}
    return CachedPrefix(
        key=key,
        tokens=runs[0].end if runs else parked[0].computed,
        cells=own_cells if shard.layout.shares_cells else all_cells,
        memory_bytes=size[Tier.MEMORY],
        disk_bytes=size[Tier.DISK],
        tenant=runs[0].note.tenant if runs else parked[0].sequence.spec.tenant.name,
        adapter=runs[0].note.adapter if runs else parked[0].adapter,
        last_used_s=max([*(resident.last_used_s for resident in parked), *(run.used_s for run in runs)]),
        pinned=shard.runs.pins.get(key) is not None,
    )


def _part_of_longer(shard: ShardAccount, pin: Pin) -> CachedPrefix:
    """Return a pinned prefix of which nothing is there but what a longer prefix begins with."""
    return CachedPrefix(
        key=pin.key,
        tokens=pin.length,
        cells=0,
        tenant=pin.tenant,
        adapter=pin.adapter,
        last_used_s=shard.runs.holding(pin.key)[-1].used_s,
        pinned=True,
    )


def tokens_of(shard: ShardAccount, key: bytes) -> tuple[int, ...] | None:
    """Return all tokens of the prefix that ``key`` names; None if ``shard`` does not have it whole, or it has media."""
    for resident in shard.stays.parked.values():
        if resident.prefix_key == key:
            known = resident.sequence.tokens(0, resident.computed)
            return None if any(map(is_cell, known)) else known
    runs = shard.runs.holding(key)
    tokens: list[int] = []
    for run in runs:
        del tokens[run.start :]
        if len(tokens) < run.start:
            return None  # what is before it has media
        tokens += run.note.tokens
    length = next((position for run in runs for position, cut in run.cuts if cut == key), 0)
    return tuple(tokens[:length]) if 0 < length <= len(tokens) else None


def running_on(shard: ShardAccount) -> tuple[RunningSequence, ...]:
    """Return the sequences that start or run on ``shard``, in the order in which they were placed."""
    return tuple(
        RunningSequence(
            request_id=resident.sequence.spec.request_id,
            tenant=resident.sequence.spec.tenant.name,
            adapter=resident.adapter,
            tokens=resident.computed,
        )
        for resident in shard.stays.residents.values()
    )
