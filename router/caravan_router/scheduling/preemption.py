"""Who gives up cells for others, and whether what it computed is saved or computed again."""

from caravan_router.scheduling.actions import Preemption
from caravan_router.scheduling.admission import GROWTH_CELLS
from caravan_router.scheduling.sequence import Resident, Sequence
from caravan_router.scheduling.shard_state import ShardState

# Before a chunk was measured: a small model on a CPU.
_FIRST_TOKEN_S = 1e-3


def _by_rank(shard: ShardState) -> list[Resident]:
    """Residents, those that should give way first in front: lowest priority, then newest."""
    return sorted(
        shard.residents.values(), key=lambda resident: (resident.priority, -resident.sequence.request.request_id)
    )


def victims_of_growth(shard: ShardState) -> list[Resident]:
    """Those to preempt because the next pass has too few cells; at least one resident always stays."""
    needed = len(shard.decoding)
    if not needed or shard.is_bounded_by_sequence or shard.available_cells >= needed:
        return []
    # More than the next pass needs, so that not every pass preempts.
    return _cover(shard, _by_rank(shard)[:-1], needed * GROWTH_CELLS)


def victims_of_priority(shard: ShardState, sequence: Sequence, known_live: int) -> list[Resident]:
    """Those of lower priority to preempt so that ``sequence`` can start here; none if that would not be enough."""
    if shard.draining or not shard.could_ever_hold(sequence):
        return []
    lower = [resident for resident in _by_rank(shard) if resident.priority < sequence.request.priority]
    needed = sequence.known_tokens - known_live + GROWTH_CELLS * (len(shard.residents) + 1)
    victims = [] if shard.is_bounded_by_sequence else _cover(shard, lower, needed)
    if shard.free_sequences <= 0 and not victims:
        victims = lower[:1]
    stays = len(shard.residents) - len(victims)
    enough = (
        not stays or shard.is_bounded_by_sequence or shard.available_cells + sum(map(_cells_back, victims)) >= needed
    )
    return victims if enough else []


def _cover(shard: ShardState, candidates: list[Resident], needed: int) -> list[Resident]:
    """As many of ``candidates`` as it takes for ``needed`` available cells, or all."""
    available = shard.available_cells
    victims = []
    for resident in candidates:
        if available >= needed:
            break
        available += _cells_back(resident)
        victims.append(resident)
    return victims


def _cells_back(resident: Resident) -> int:
    """Cells that are had by preempting it: at least, since shared ones may come back too."""
    return max(resident.target, resident.computed) - resident.shared


def choose_how(shard: ShardState, resident: Resident, kept_length: int) -> Preemption:
    """Whichever costs less by what was measured. ``kept_length``: its first tokens, which stay in the cache."""
    if not shard.limits.swap_bytes or not resident.begun:
        return Preemption.RECOMPUTE
    cells = resident.computed - kept_length
    token_s = shard.idle_cost.token_s or shard.mixed_cost.token_s or _FIRST_TOKEN_S
    return Preemption.SWAP if 2 * cells * shard.swap_cost.cell_s < cells * token_s else Preemption.RECOMPUTE
