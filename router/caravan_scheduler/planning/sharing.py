"""Which prompts share the steps of a long one, which takes longer by that."""

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident

# A prompt is much shorter than another one if that has so many times as much left, or so many if both are of a key.
_SHORTER, _SHORTER_OF_KEY = 2, 8


def left_of(resident: Resident) -> int:
    """Return how many tokens of its prompt are to be computed."""
    return resident.target - resident.computed


def passes(shard: ShardAccount, config: SchedulerConfig, sequence: Sequence, tokens: int, resident: Resident) -> bool:
    """Whether ``sequence``, which waits and has ``tokens`` to compute, need not wait for all of ``resident``."""
    left = left_of(resident)
    if sequence.kept is not None:
        return tokens <= 2 * left
    is_other_key = sequence.spec.tenant.name != resident.sequence.spec.tenant.name
    return _is_much_shorter(shard, config, tokens, left, is_other=is_other_key)


def much_shorter(shard: ShardAccount, config: SchedulerConfig, prefilling: list[Resident]) -> list[Resident]:
    """Return the prompts that share the step with the first one, since they are much shorter."""
    if len(prefilling) < 2:
        return []
    first = prefilling[0]
    left, key = left_of(first), first.sequence.spec.tenant.name
    found = []
    for one in prefilling[1:]:
        is_other = one.sequence.goes_on or one.sequence.spec.tenant.name != key
        if one.priority >= first.sequence.spec.priority and _is_much_shorter(
            shard, config, left_of(one), left, is_other=is_other
        ):
            found.append(one)
    return sorted(found, key=left_of)


def _is_much_shorter(shard: ShardAccount, config: SchedulerConfig, tokens: int, left: int, *, is_other: bool) -> bool:
    """Whether a prompt with ``tokens`` to compute shares the steps of one that has ``left``.

    Its own key gains by that only where others would wait long, and for little. ``is_other``: whether it is of another
    key, or of a job that goes on.
    """
    if is_other:
        return _SHORTER * tokens <= left
    return shard.costs.prompt_token_s * left > config.idle_step_s and _SHORTER_OF_KEY * tokens <= left
