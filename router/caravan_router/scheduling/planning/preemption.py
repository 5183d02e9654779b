"""Who gives up cells for others, and whether what it computed is saved or computed again."""

from collections.abc import Callable

from caravan_router.scheduling.actions import Preemption
from caravan_router.scheduling.planning.forecast import GROWTH_CELLS, CellForecast
from caravan_router.scheduling.sequence import Sequence
from caravan_router.scheduling.shard.ledger import ShardState
from caravan_router.scheduling.shard.resident import Resident

# Before a chunk was measured: a small model on a CPU.
_FIRST_TOKEN_S = 1e-3


def _by_rank(shard: ShardState) -> list[Resident]:
    """Residents, those that should give way first in front: lowest priority, then newest."""
    return sorted(shard.residents.values(), key=lambda resident: (resident.priority, -resident.sequence.request_id))


def victims_of_growth(shard: ShardState) -> list[Resident]:
    """Those to preempt because the next pass has too few cells; at least one resident always stays."""
    needed = len(shard.decoding)
    if not needed or shard.is_bounded_by_sequence or shard.available_cells >= needed:
        return []
    # More than the next pass needs, so that not every pass preempts.
    return _cover(shard, _by_rank(shard)[:-1], needed * GROWTH_CELLS)


def victims_of_priority(
    shard: ShardState, sequence: Sequence, known_live: int, forecast: Callable[[list[Resident]], CellForecast]
) -> list[Resident]:
    """Those of lower priority to preempt so that ``sequence`` can start here; none if nothing helps or is needed.

    ``forecast``: of the shard without some residents. ``known_live``: tokens of ``sequence`` in cells of residents.
    """
    if shard.draining or not shard.could_ever_hold(sequence):
        return []
    victims: list[Resident] = []
    for resident in _by_rank(shard):
        if shard.free_sequences + len(victims) > 0 and forecast(victims).has_room(sequence, known_live):
            return victims
        if resident.priority >= sequence.spec.priority:
            return []
        victims.append(resident)
    return victims


def _cover(shard: ShardState, candidates: list[Resident], needed: int) -> list[Resident]:
    """As many of ``candidates`` as it takes for ``needed`` available cells, or all."""
    available = shard.available_cells
    victims = []
    for resident in candidates:
        if available >= needed:
            break
        available += resident.own_cells
        victims.append(resident)
    return victims


def choose_how(shard: ShardState, resident: Resident, kept_length: int) -> Preemption:
    """Whichever costs less by what was measured. ``kept_length``: its first tokens, which stay in the cache."""
    if not shard.limits.swap_bytes or not resident.begun:
        return Preemption.RECOMPUTE
    cells = resident.computed - kept_length
    token_s = shard.idle_cost.token_s or shard.mixed_cost.token_s or _FIRST_TOKEN_S
    return Preemption.SWAP if 2 * cells * shard.swap_cost.cell_s < cells * token_s else Preemption.RECOMPUTE
