"""Which residents give up their cells for others, and whether their tokens are saved or computed again."""

from collections.abc import Callable

from caravan_scheduler.actions import Preemption
from caravan_scheduler.planning.forecast import GROWTH_CELLS, CellForecast
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.command import InFlight
from caravan_scheduler.shard.prefix_reuse import LOAD_S, copy_s, find_match
from caravan_scheduler.shard.resident import Resident


def _by_rank(shard: ShardAccount) -> list[list[Resident]]:
    """Return the residents in the order in which they should give way: lowest priority first, then newest.

    The beams of a search give way together.
    """
    ranked = sorted(shard.stays.residents.values(), key=lambda resident: (resident.priority, -resident.request_id))
    if not shard.stays.beam_groups:
        return [[resident] for resident in ranked]
    together: dict[int, list[Resident]] = {}
    for resident in ranked:
        group = resident.sequence.group
        request_id = resident.request_id if group is None else group.leader.request_id
        together.setdefault(request_id, []).append(resident)
    return list(together.values())


def victims_of_growth(shard: ShardAccount) -> list[Resident]:
    """Return whom to preempt because the next step has too few cells. At least one resident always stays."""
    decoding = len(shard.stays.decoding)
    beams = sum(group.width for group in shard.stays.beam_groups)
    if not (decoding or beams) or shard.capacity.is_bounded_by_sequence or shard.cells.available >= decoding:
        return []
    # More than the next step needs, so that not every step preempts.
    wanted = (decoding + beams) * GROWTH_CELLS
    available = shard.cells.available
    victims: list[Resident] = []
    for residents in _by_rank(shard)[:-1]:
        if available >= wanted:
            break
        available += sum(resident.own_cells for resident in residents)
        victims += residents
    return victims


def victims_of_priority(
    shard: ShardAccount, sequence: Sequence, forecast_without: Callable[[list[Resident]], CellForecast]
) -> list[Resident]:
    """Return residents of lower priority to preempt so that ``sequence`` can start; none if that is no help or need.

    ``forecast_without``: makes the forecast of the shard as if some residents were gone.
    """
    if shard.drain.has_begun or not shard.capacity.could_ever_hold(sequence):
        return []
    known_live = find_match(shard, sequence).live_length
    victims: list[Resident] = []
    needed = 1 if sequence.group is None else sequence.group.width
    for residents in _by_rank(shard):
        if shard.stays.free_sequences + len(victims) >= needed and forecast_without(victims).has_room(
            sequence, known_live
        ):
            return victims
        if residents[0].priority >= sequence.spec.priority:
            return []
        victims += residents
    return victims


def victim_of_full_cache(shard: ShardAccount, command: InFlight) -> Resident | None:
    """Return the newest resident that ``command`` names; None if none of them is resident any more."""
    named = [one for sequence_id, one in command.residents.items() if shard.stays.residents.get(sequence_id) is one]
    return max(named, key=lambda resident: resident.request_id, default=None)


def choose_how(shard: ShardAccount, resident: Resident, transfer_s: float = 0.0) -> Preemption:
    """Return what costs less by what was measured: saving its cells and loading them again, or computing them again.

    ``transfer_s``: the time until another shard has fetched them.
    """
    if not shard.saves.are_possible or not resident.is_running or resident.is_beam:
        return Preemption.RECOMPUTE
    out_and_in_s = transfer_s + LOAD_S + 2 * copy_s(shard, resident.computed)
    recompute_s = resident.computed * shard.costs.recompute_token_s
    if (media := resident.sequence.spec.media) is not None:
        recompute_s += shard.media.encode_s(media.within(0, resident.computed))
    return Preemption.SWAP if out_and_in_s < recompute_s else Preemption.RECOMPUTE
