"""What must hold between any two calls of the scheduler. The property tests check it; so does the shell at rest."""

from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Status


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError with the numbers if an invariant is broken."""
    waiting = [sequence.request_id for sequence in scheduler.waiting]
    assert waiting == sorted(set(waiting)), f"queue out of order or with doubles: {waiting}"
    assert len(scheduler.waiting) == len(waiting), f"the queue counts {len(scheduler.waiting)} of {len(waiting)}"
    shards = scheduler.shards.values()
    staying = [
        resident.request_id
        for shard in shards
        for resident in (*shard.stays.residents.values(), *shard.stays.leaving.values())
        if resident.is_live
    ]
    assert len(staying) == len(set(staying)), f"two stays of one request: {sorted(staying)}"
    assert not set(waiting) & set(staying), f"waiting and on a shard: {set(waiting) & set(staying)}"
    resting = _resting_beams(scheduler, set(waiting), set(staying))
    known = set(waiting) | set(staying) | resting
    assert known == set(scheduler.sequences), "a live request is nowhere, or an ended one is kept"
    for sequence in scheduler.waiting if shards else ():
        assert any(shard.capacity.could_ever_hold(sequence) for shard in shards), (
            f"{sequence.request_id} waits and fits nowhere"
        )
    for shard in shards:
        _check_ids(shard)
        _check_residents(shard)
        _check_cells(shard)
        _check_commands(shard)


def _resting_beams(scheduler: Scheduler, waiting: set[int], staying: set[int]) -> set[int]:
    """Return the members of beam searches that have no beam. Check that each search waits or is on one shard."""
    resting: set[int] = set()
    for sequence in scheduler.sequences.values():
        group = sequence.group
        if group is None or sequence is not group.leader:
            continue
        ids = {member.request_id for member in group.members}
        assert not group.is_whole or (ids & waiting == {sequence.request_id}) != bool(ids & staying), (
            f"beam search {sequence.request_id} waits and runs, or does neither"
        )
        homes = [shard.name for shard in scheduler.shards.values() if group in shard.stays.beam_groups]
        assert len(homes) <= 1, f"beam search {sequence.request_id} is on {homes}"
        resting |= ids - waiting - staying
    return resting


def _check_ids(shard: ShardAccount) -> None:
    tables = (
        (shard.stays.residents, {Status.STARTING, Status.LOADED, Status.RUNNING}),
        (shard.stays.leaving, {Status.LEAVING, Status.DROPPED}),
        (shard.stays.parked, {Status.PARKED}),
        (shard.stays.releasing, {Status.RELEASING}),
    )
    ids = sorted([*shard.stays.free_ids, *(sequence_id for table, _ in tables for sequence_id in table)])
    assert ids == list(range(shard.capacity.limits.max_sequences)), f"{shard.name}: sequence ids do not add up: {ids}"
    beams = {one.sequence_id: group for group, beams in shard.stays.beam_groups.items() for one in beams.values()}
    assert beams == {key: one.sequence.group for key, one in shard.stays.residents.items() if one.is_beam}, (
        f"{shard.name}: beams {beams}"
    )
    adapters = {one.adapter for one in shard.stays.residents.values()}
    assert shard.stays.adapters == adapters, f"{shard.name}: adapters {shard.stays.adapters} and not {adapters}"
    for command in shard.commands.in_flight:
        live = sum(one.is_live for one in command.residents.values())
        assert command.live(shard.stays.version) == live, f"{shard.name}: {live} residents of a command are live"
    reserved = sum(group.width for group in shard.stays.beam_groups) - len(beams)
    # Ids in `leaving` come back with the end of the command that saves their cells, and before it no beam branches off.
    assert reserved <= len(ids) - len(shard.stays.residents), f"{shard.name}: {reserved} ids are missing"
    for table, statuses in tables:
        for sequence_id, resident in table.items():
            assert resident.sequence_id == sequence_id, (
                f"{shard.name}: {resident.sequence_id} is filed as {sequence_id}"
            )
            assert resident.status in statuses, f"{shard.name}: {sequence_id} is {resident.status}, not {statuses}"


def _check_residents(shard: ShardAccount) -> None:
    residents = shard.stays.residents
    incomplete = {key: one for key, one in residents.items() if one.computed < one.target}
    assert shard.stays.incomplete == incomplete, f"{shard.name}: {list(shard.stays.incomplete)} count as incomplete"
    in_order = [key for key, one in shard.stays.incomplete.items() if not one.is_beam]
    assert in_order == [key for key in residents if key in set(in_order)], f"{shard.name}: {in_order} out of order"
    for sequence_id, resident in residents.items():
        computed = resident.computed
        assert computed <= resident.sequence.request.peak_cells, f"{shard.name}: {sequence_id} grew too far"
        assert computed <= shard.layout.cells_per_sequence, f"{shard.name}: {sequence_id} outgrew its share"
        if resident.status is Status.STARTING:
            assert any(command.residents.get(sequence_id) is resident for command in shard.commands.in_flight), (
                f"{shard.name}: no command starts {sequence_id}"
            )


def _check_cells(shard: ShardAccount) -> None:
    running = [*shard.stays.residents.values(), *shard.stays.leaving.values()]
    for resident in running:
        held, computed = shard.cells.tree.length(resident.sequence_id), resident.computed
        assert held <= computed, f"{shard.name}: {resident.sequence_id} has {held} of {computed} tokens in the tree"
    live, held = shard.cells.live, shard.cells.held
    if shard.layout.shares_cells:
        tails = sum(map(shard.cells.tail, running))
        assert live == shard.cells.tree.live_cells + tails, f"{shard.name}: {live} live cells, {tails} beyond the tree"
    assert 0 <= live <= held, f"{shard.name}: {live} live cells of {held} held"
    assert shard.stays.parked or shard.stays.leaving or live == held, (
        f"{shard.name}: {live} live cells, {held} held, none parked"
    )
    assert running or shard.stays.parked or held == 0, f"{shard.name}: {held} cells are held by no request"


def _check_commands(shard: ShardAccount) -> None:
    commands = shard.commands.in_flight
    assert len(commands) <= 2, f"{shard.name}: {len(commands)} commands under way"
    assert len(commands) < 2 or commands[0].is_decode, f"{shard.name}: only a Decode may be overtaken"
    if shard.stays.residents or shard.stays.leaving or shard.header.is_needed:
        assert commands, f"{shard.name}: has something to do and does nothing"
