"""What moves between shards: saved prefixes to where they are needed, and everything from a shard that drains."""

from caravan_router.scheduling.actions import Drained, Fetch, Preemption
from caravan_router.scheduling.beams import BeamGroup
from caravan_router.scheduling.planning.forecast import GROWTH_CELLS
from caravan_router.scheduling.planning.placement import Place
from caravan_router.scheduling.planning.preemption import choose_how
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.account import LOAD_S, ShardAccount
from caravan_router.scheduling.shard.ledger import ShardLedger
from caravan_router.scheduling.shard.resident import Resident
from caravan_router.scheduling.shard.saved_runs import NO_PREFIX, SavedPrefix
from caravan_router.scheduling.state import SchedulerState
from caravan_router.scheduling.transfers import Transfer

# Sequences stay on a shard that drains while no other has room for them, but no longer than so many seconds.
_PATIENCE_S = 5.0
# Prefixes of ended sequences leave a draining shard only as far as their transfer takes no longer, in seconds.
_PREFIXES_S = 2.0
# Continuing from saved cells keeps a text equal to the bit, which is worth this many seconds.
_SAME_TEXT_S = 0.5
# Most transfers for one waiting request: its prefix must not follow it from shard to shard.
MOST_FETCHES = 2


def can_exchange(one: ShardAccount, other: ShardAccount) -> bool:
    """Whether ``one`` can fetch what ``other`` has saved."""
    fingerprint = one.limits.run_fingerprint
    return bool(fingerprint) and one is not other and fingerprint == other.limits.run_fingerprint and one.can_save


# A prefix that a request needs


def begin_fetch(state: SchedulerState, sequence: Sequence, place: Place) -> bool:
    """Begin to fetch what another shard has saved of ``sequence`` if that is faster than computing it in ``place``."""
    target = place.plan.shard
    if sequence.fetches >= MOST_FETCHES or not target.can_save:
        return False
    token_s = target.costs.recompute_token_s
    gain_s = _SAME_TEXT_S if sequence.output else 0.0
    if gain_s + (sequence.most_cached - place.cached) * token_s <= LOAD_S + state.transfers.seconds(target.name, 0):
        return False
    sources = [shard for shard in state.shards.values() if _may_have(shard, sequence) and can_exchange(target, shard)]
    found = [(shard.runs.find(sequence.keys, sequence.known_tokens, sequence.most_cached), shard) for shard in sources]
    if not found:
        return False
    prefix, source = max(found, key=lambda pair: pair[0].length)
    runs = source.runs.describe(piece.key for piece in prefix.slices if piece.key not in target.runs)
    size_bytes = sum(run.size_bytes for run in runs)
    fetch_s = state.transfers.seconds(target.name, size_bytes) + LOAD_S + prefix.length * target.costs.copy_cell_s
    is_worth_it = (
        fetch_s < gain_s + (prefix.length - place.cached) * token_s and size_bytes <= target.limits.memory_bytes
    )
    if not runs or not is_worth_it:
        return False
    state.note_fetch(sequence)
    source.runs.use(prefix)
    _send(state, state.transfers.begin(source.name, target.name, runs, sequence.request_id), prefix)
    return True


def _may_have(shard: ShardAccount, sequence: Sequence) -> bool:
    return shard.name == sequence.saved_on or shard.runs.has_beginning(sequence.keys, sequence.known_tokens)


def _send(state: SchedulerState, transfer: Transfer, keep: SavedPrefix) -> None:
    """Make room on the target, except by giving up ``keep``, and let it fetch."""
    state.shards[transfer.target].expect_runs(transfer.size_bytes, keep)
    state.note_change(transfer.target, may_start=False)
    state.outbox.add(
        Fetch(
            transfer_id=transfer.transfer_id,
            source=transfer.source,
            target=transfer.target,
            keys=tuple(run.key for run in transfer.runs),
            size_bytes=transfer.size_bytes,
        )
    )


# A shard that drains


def to_move(state: SchedulerState, shard: ShardAccount, now: float) -> list[Resident]:
    """Return the sequences of ``shard`` that should continue elsewhere; none unless it drains."""
    if not shard.draining:
        return []
    others = [other for other in state.shards.values() if not other.draining]
    is_patient = now - shard.draining_since_s < _PATIENCE_S
    rooms = {other.name: (other.free_sequences, other.available_cells) for other in others}
    found: list[Resident] = []
    for group, beams in shard.beam_groups.items():
        if all(resident.is_running for resident in beams.values()) and (
            not is_patient or any(_has_room_for_beams(other, group) for other in others)
        ):
            found += beams.values()
    for resident in shard.residents.values():
        if resident.is_beam:
            continue
        able = [other for other in others if other.could_ever_hold(resident.sequence)]
        if not resident.is_running or not able:
            continue
        cells = resident.computed + GROWTH_CELLS
        room = next((other for other in able if _has_room(other, resident, rooms[other.name], cells)), None)
        if room is not None:
            sequences, available = rooms[room.name]
            rooms[room.name] = sequences - 1, available - cells
        elif is_patient:
            continue
        found.append(resident)
    return found


def _has_room_for_beams(other: ShardAccount, group: BeamGroup) -> bool:
    cells = len(group.leader.spec.prompt) + group.width * (len(group.leader.output) + GROWTH_CELLS)
    has_room = other.free_sequences >= group.width and other.available_cells >= cells
    return has_room and other.could_hold_now(group.leader)


def _has_room(other: ShardAccount, resident: Resident, room: tuple[int, int], cells: int) -> bool:
    sequences, available = room
    return sequences > 0 and available >= cells and other.could_hold_now(resident.sequence)


def how_to_move(state: SchedulerState, shard: ShardAccount, resident: Resident) -> Preemption:
    """Return what costs less: to save and fetch the cells of ``resident``, or to compute them again elsewhere."""
    if not any(can_exchange(other, shard) for other in state.shards.values() if not other.draining):
        return Preemption.RECOMPUTE
    size_bytes = int(resident.computed * shard.runs.cell_bytes)
    return choose_how(shard, resident, transfer_s=state.transfers.seconds("", size_bytes) - _SAME_TEXT_S)


def finish_drains(state: SchedulerState) -> None:
    """Let those of the shards that changed end that drain and have nothing left that others need."""
    for name in list(state.changes):
        shard = state.shards.get(name)
        if shard is None or not shard.is_empty or shard.is_drained:
            continue
        if not shard.has_moved_prefixes:
            shard.note_prefixes_moved()
            _move_prefixes(state, shard)
        if state.transfers.involve(name) or any(sequence.saved_on == name for sequence in state.waiting):
            continue
        shard.note_drained()
        state.outbox.add(Drained(name))


def _move_prefixes(state: SchedulerState, shard: ShardLedger) -> None:
    """Let another shard fetch what was saved of ended sequences, the most recently used first."""
    others = [other for other in state.shards.values() if not other.draining and can_exchange(other, shard)]
    if not others:
        return
    target = max(others, key=lambda other: other.runs.memory_room)
    most_bytes = min(target.runs.memory_room, state.transfers.bytes_within(_PREFIXES_S))
    runs = shard.runs.describe_recent(most_bytes, without=target.runs)
    if runs:
        _send(state, state.transfers.begin(shard.name, target.name, runs), NO_PREFIX)
