"""What must hold between any two calls of the scheduler. Run by the property tests, and at rest by the shell."""

from caravan_router.scheduling.scheduler import Scheduler
from caravan_router.scheduling.shard_state import ShardState


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError with the numbers if an invariant is broken."""
    waiting = [sequence.request.request_id for sequence in scheduler.waiting]
    assert waiting == sorted(set(waiting)), f"queue out of order or with doubles: {waiting}"
    resident = [
        resident.sequence.request.request_id
        for shard in scheduler.shards.values()
        for resident in shard.residents.values()
    ]
    assert len(resident) == len(set(resident)), f"resident twice: {sorted(resident)}"
    assert not set(waiting) & set(resident), f"waiting and resident: {set(waiting) & set(resident)}"
    assert set(waiting) | set(resident) == set(scheduler.sequences), (
        "a live request is nowhere, or an ended one is kept"
    )
    for shard in scheduler.shards.values():
        _check_shard(shard)


def _check_shard(shard: ShardState) -> None:
    limits = shard.limits
    ids = sorted([*shard.free_ids, *shard.residents, *shard.releasing])
    assert ids == list(range(limits.max_sequences)), f"{shard.name}: sequence ids do not add up: {ids}"
    reserved = sum(resident.sequence.request.peak_cells for resident in shard.residents.values())
    assert reserved + shard.free_cells == limits.cells, (
        f"{shard.name}: {reserved} reserved + {shard.free_cells} free != {limits.cells} cells"
    )
    assert shard.free_cells >= 0, f"{shard.name}: {reserved} cells promised of {limits.cells}"
    for resident in shard.residents.values():
        assert resident.live, f"{shard.name}: an ended sequence holds id {resident.sequence_id}"
        assert resident.computed <= resident.sequence.request.peak_cells, (
            f"{shard.name}: {resident.sequence_id} grew too far"
        )
        assert resident.computed <= limits.cells_per_sequence, f"{shard.name}: {resident.sequence_id} outgrew its share"
    assert len(shard.in_flight) <= 2, f"{shard.name}: {len(shard.in_flight)} commands under way"
    assert len(shard.in_flight) < 2 or shard.in_flight[0].is_decode, f"{shard.name}: only a Decode may be overtaken"
    if shard.residents or shard.releasing:
        assert shard.in_flight, f"{shard.name}: holds sequences and has nothing to do"
