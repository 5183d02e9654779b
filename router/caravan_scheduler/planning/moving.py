"""What moves between shards: saved prefixes to where they are needed, and everything from a shard that drains."""

from caravan_scheduler.actions import Drained, Fetch, Preemption
from caravan_scheduler.beams import BeamGroup
from caravan_scheduler.planning.forecast import GROWTH_CELLS
from caravan_scheduler.planning.placement import Place
from caravan_scheduler.planning.preemption import choose_how
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.ledger import ShardLedger
from caravan_scheduler.shard.prefix_reuse import LOAD_S, copy_s, find_saved
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedPrefix
from caravan_scheduler.state import SchedulerState
from caravan_scheduler.transfers import MOST_FETCHES, Transfer

# Sequences stay on a shard that drains while no other has room for them, but no longer than this many seconds.
_MOST_STAY_S = 5.0
# Prefixes of ended sequences leave a draining shard only as far as their transfer takes no longer, in seconds.
_PREFIXES_S = 2.0
# Continuing from saved cells keeps a text equal to the bit, which is worth this many seconds.
_SAME_TEXT_S = 0.5


def can_exchange(one: ShardAccount, other: ShardAccount) -> bool:
    """Whether ``one`` can fetch what ``other`` has saved."""
    fingerprint = one.capacity.limits.run_fingerprint
    is_same_format = bool(fingerprint) and fingerprint == other.capacity.limits.run_fingerprint
    return is_same_format and one is not other and one.saves.are_possible


# A prefix that a request needs


def begin_fetch(state: SchedulerState, sequence: Sequence, place: Place) -> bool:
    """Begin to fetch what another shard has saved of ``sequence`` if that is faster than computing it in ``place``."""
    target = place.shard
    if sequence.fetches >= MOST_FETCHES or not target.saves.are_possible:
        return False
    token_s = target.costs.recompute_token_s
    gain_s = _SAME_TEXT_S if sequence.output else 0.0
    if gain_s + (sequence.most_cached - place.cached) * token_s <= LOAD_S + state.transfers.seconds(target.name, 0):
        return False
    sources = [shard for shard in state.shards.values() if _may_have(shard, sequence) and can_exchange(target, shard)]
    found = [(find_saved(shard, sequence), shard) for shard in sources]
    if not found:
        return False
    prefix, source = max(found, key=lambda pair: pair[0].length)
    runs = source.runs.describe(piece.key for piece in prefix.slices if piece.key not in target.runs)
    size_bytes = sum(run.size_bytes for run in runs)
    fetch_s = state.transfers.seconds(target.name, size_bytes) + LOAD_S + copy_s(target, prefix.length)
    encode_s = 0.0
    if sequence.spec.media is not None:
        encode_s = target.media.encode_s(sequence.spec.media.within(place.cached, prefix.length))
    is_worth_it = (
        fetch_s < gain_s + (prefix.length - place.cached) * token_s + encode_s
        and size_bytes <= target.capacity.limits.memory_bytes
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
    state.shards[transfer.target].saves.expect(transfer.size_bytes, keep)
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
    if not shard.drain.has_begun:
        return []
    others = [other for other in state.shards.values() if not other.drain.has_begun]
    may_stay = now - shard.drain.began_s < _MOST_STAY_S
    rooms = {other.name: (other.stays.free_sequences, other.cells.available) for other in others}
    found: list[Resident] = []
    for group, beams in shard.stays.beam_groups.items():
        if all(resident.is_running for resident in beams.values()) and (
            not may_stay or any(_has_room_for_beams(other, group) for other in others)
        ):
            found += beams.values()
    for resident in shard.stays.residents.values():
        if resident.is_beam:
            continue
        able = [other for other in others if other.capacity.could_ever_hold(resident.sequence)]
        if not resident.is_running or not able:
            continue
        cells = resident.computed + GROWTH_CELLS
        room = next((other for other in able if _has_room(other, resident, rooms[other.name], cells)), None)
        if room is not None:
            sequences, available = rooms[room.name]
            rooms[room.name] = sequences - 1, available - cells
        elif may_stay:
            continue
        found.append(resident)
    return found


def _has_room_for_beams(other: ShardAccount, group: BeamGroup[Sequence]) -> bool:
    cells = len(group.leader.spec.prompt) + group.width * (len(group.leader.output) + GROWTH_CELLS)
    has_room = other.stays.free_sequences >= group.width and other.cells.available >= cells
    return has_room and other.capacity.could_hold_now(group.leader)


def _has_room(other: ShardAccount, resident: Resident, room: tuple[int, int], cells: int) -> bool:
    sequences, available = room
    return sequences > 0 and available >= cells and other.capacity.could_hold_now(resident.sequence)


def how_to_move(state: SchedulerState, shard: ShardAccount, resident: Resident) -> Preemption:
    """Return what costs less: to save and fetch the cells of ``resident``, or to compute them again elsewhere."""
    if not any(can_exchange(other, shard) for other in state.shards.values() if not other.drain.has_begun):
        return Preemption.RECOMPUTE
    size_bytes = shard.runs.bytes_of(resident.computed)
    return choose_how(shard, resident, transfer_s=state.transfers.seconds("", size_bytes) - _SAME_TEXT_S)


def finish_drains(state: SchedulerState) -> None:
    """Let those of the shards that changed end that drain and have nothing left that others need."""
    for name in list(state.changes):
        shard = state.shards.get(name)
        if shard is None or not _is_empty(shard) or shard.drain.has_ended:
            continue
        if not shard.drain.has_moved_prefixes:
            shard.drain.has_moved_prefixes = True
            _move_prefixes(state, shard)
        if state.transfers.involve(name) or any(sequence.saved_on == name for sequence in state.waiting):
            continue
        shard.drain.has_ended = True
        state.outbox.add(Drained(name))


def _is_empty(shard: ShardAccount) -> bool:
    """Whether no sequence is left on ``shard``, which drains, nor a command under way, nor something to save."""
    stays = shard.stays
    if not shard.drain.has_begun or stays.residents or stays.leaving or shard.commands.in_flight:
        return False
    return not shard.saves.are_possible or all(resident.is_expendable for resident in stays.parked.values())


def _move_prefixes(state: SchedulerState, shard: ShardLedger) -> None:
    """Let another shard fetch what was saved of ended sequences: what is pinned, then the most recently used."""
    others = [other for other in state.shards.values() if not other.drain.has_begun and can_exchange(other, shard)]
    if not others:
        return
    target = max(others, key=lambda other: other.runs.memory_room)
    held = {key for other in others for key in other.runs.pinned}
    pinned = shard.runs.describe(key for key in shard.runs.pinned if key not in held)
    pinned_bytes = sum(run.size_bytes for run in pinned)
    if pinned_bytes > target.capacity.limits.memory_bytes:
        pinned, pinned_bytes = [], 0
    most_bytes = min(target.runs.memory_room, state.transfers.bytes_within(_PREFIXES_S)) - pinned_bytes
    known = {run.key for run in pinned}
    recent = [run for run in shard.runs.describe_recent(most_bytes, without=target.runs) if run.key not in known]
    runs = sorted((*pinned, *recent), key=lambda run: run.start)
    if runs:
        _send(state, state.transfers.begin(shard.name, target.name, runs), NO_PREFIX)
