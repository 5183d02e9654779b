"""What must hold between any two calls of the scheduler. Run by the property tests, and at rest by the shell."""

from caravan_router.scheduling.scheduler import Scheduler
from caravan_router.scheduling.shard.ledger import ShardState


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError with the numbers if an invariant is broken."""
    waiting = [sequence.request_id for sequence in scheduler.waiting]
    assert waiting == sorted(set(waiting)), f"queue out of order or with doubles: {waiting}"
    resident = [
        resident.sequence.request_id
        for shard in scheduler.shards.values()
        for resident in (*shard.residents.values(), *shard.leaving.values())
        if resident.live
    ]
    assert len(resident) == len(set(resident)), f"resident twice: {sorted(resident)}"
    assert not set(waiting) & set(resident), f"waiting and resident: {set(waiting) & set(resident)}"
    assert set(waiting) | set(resident) == set(scheduler.sequences), (
        "a live request is nowhere, or an ended one is kept"
    )
    shards = scheduler.shards.values()
    for sequence in scheduler.waiting if shards else ():
        assert any(shard.could_ever_hold(sequence) for shard in shards), f"{sequence.request_id} waits and fits nowhere"
    for shard in shards:
        _check_shard(shard)


def _check_shard(shard: ShardState) -> None:
    limits = shard.limits
    groups = (shard.free_ids, shard.residents, shard.leaving, shard.parked, shard.releasing)
    ids = sorted(sequence_id for group in groups for sequence_id in group)
    assert ids == list(range(limits.max_sequences)), f"{shard.name}: sequence ids do not add up: {ids}"
    _check_cells(shard)
    for resident in shard.residents.values():
        assert resident.live, f"{shard.name}: an ended sequence holds id {resident.sequence_id}"
        assert resident.computed <= resident.sequence.request.peak_cells, (
            f"{shard.name}: {resident.sequence_id} grew too far"
        )
        assert resident.computed <= limits.cells_per_sequence, f"{shard.name}: {resident.sequence_id} outgrew its share"
    assert len(shard.in_flight) <= 2, f"{shard.name}: {len(shard.in_flight)} commands under way"
    assert len(shard.in_flight) < 2 or shard.in_flight[0].is_decode, f"{shard.name}: only a Decode may be overtaken"
    if shard.residents or shard.has_header:
        assert shard.in_flight, f"{shard.name}: has something to do and does nothing"


def _check_cells(shard: ShardState) -> None:
    tree = shard.tree
    running = [*shard.residents.values(), *shard.leaving.values()]
    for resident in running:
        held = tree.length(resident.sequence_id)
        assert held == resident.indexed <= resident.computed, (
            f"{shard.name}: sequence {resident.sequence_id} has {held} tokens in the tree, {resident.indexed} entered"
        )
    assert 0 <= shard.live_cells <= shard.held_cells, (
        f"{shard.name}: {shard.live_cells} live cells of {shard.held_cells} held"
    )
    if not shard.parked:
        assert shard.live_cells == shard.held_cells, (
            f"{shard.name}: {shard.live_cells} live cells, {shard.held_cells} held, and nothing is parked"
        )
    if not running and not shard.parked:
        assert shard.held_cells == 0, f"{shard.name}: {shard.held_cells} cells are held by nobody"
