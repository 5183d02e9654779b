"""Describes shards to operators."""

from caravan_dialects.api.admin.schema import Shard, ShardLimits, ShardNumerics, ShardSpeculation
from caravan_proto.messages.model import Numerics
from caravan_scheduler.core.shards import ShardReport, ShardRoom


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
