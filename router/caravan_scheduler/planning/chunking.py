"""How many prompt tokens the next step computes, of one prompt after another, and when decodes wait for them."""

import math
from dataclasses import dataclass

from caravan_scheduler.config import JoinReason, PrefillMode, SchedulerConfig
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.costs import FAST_CHUNK_TOKENS, ShardCosts
from caravan_scheduler.shard.resident import Resident

# A step with fewer prompt tokens is mostly overhead.
MIN_CHUNK_TOKENS = 16
# A chunk of a size that was not measured lately gets this part of the time less: decodes would wait for a wrong guess.
_DOUBT = 0.2
# A chunk takes the rest of its prompt with it if the step then takes at most so many times as long as it may beside
# decodes. Where it takes longer than that anyway, so many times as long as without the rest.
_MOST_MERGED = 1.2
# Decodes that have waited for more than this part of their target go before all prompts.
_LATE_SHARE = 0.25
# With a waiting_served_ratio of 0, prompts get all the time that there is.
_LEAST_RATIO = 1e-3
# Chunks grow by amounts that suit the tiles of the kernels.
_TILE_TOKENS = 8
# A step with fewer tokens left takes no other prompt: a chunk of three neither is nor leaves a single token.
_LEAST_CHUNK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Riders:
    """``count`` decodes that ride with a step, and alone take ``seconds``.

    ``claim``: whether any of them claims the target, see `Claims`.
    """

    count: int
    seconds: float
    claim: bool


def step_seconds(config: SchedulerConfig, *, prompts: int, riders: Riders) -> float:
    """Return how long the next step may take beside ``riders``.

    That is the target of the decodes, and more where prompts lose more by it than decodes gain:

    - as prompts outnumber the decodes. A crowd's time to first token weighs more than the gaps of a few, and larger
      chunks serve it faster. TGI's waiting_served_ratio does the same by stopping the decodes; this does it by degrees.
    - where all decodes came with the prompts. Only the order of the queue put them first, and all end sooner if the
      last of them starts sooner.
    - where decodes fill most of the target. Prompts get the share of the time that is theirs by heads, and those that
      wait behind the first weigh 1 / ``waiting_served_ratio`` each: where that many wait, TGI would stop all decodes.
    """
    if not riders.count:
        return config.idle_step_s
    if not riders.claim:
        return max(config.target_itl_s, config.idle_step_s)
    weight = min(prompts, 1) + max(0, prompts - 1) / max(config.waiting_served_ratio, _LEAST_RATIO)
    fair_s = max(config.target_itl_s * prompts / riders.count, riders.seconds * (1 + weight / riders.count))
    return max(config.target_itl_s, min(config.idle_step_s, fair_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step that may take ``seconds`` beside ``riders`` decodes.

    ``is_late``: whether these have waited so long already that it carries nothing else.
    """

    seconds: float
    riders: int
    is_late: bool = False


def step_after(config: SchedulerConfig, seconds: float, *, riders: Riders, waited_s: float) -> Step:
    """Return a step of ``seconds`` for ``riders`` that have waited for ``waited_s`` since their last token.

    A change of the layout, or copies between two steps, are part of their gap.
    """
    if not riders.claim or waited_s <= 0:
        return Step(seconds=seconds, riders=riders.count)
    is_late = waited_s > _LATE_SHARE * config.target_itl_s
    return Step(seconds=max(0.0, seconds - waited_s), riders=riders.count, is_late=is_late)


def chunk_budget(
    config: SchedulerConfig, costs: ShardCosts, step: Step, *, context: int, remaining: int | None = None
) -> int:
    """Return the prompt tokens for ``step`` of a prompt with ``remaining`` to compute, behind ``context`` tokens.

    They are at least MIN_CHUNK_TOKENS, unless decodes go before all prompts. Where the attention of small chunks is
    slow, the step takes longer than it may, by no larger a factor than the prompt gets faster and than fast attention
    saves; and no small chunk is left over.
    """
    riders = step.riders
    if riders and (step.is_late or config.mode is PrefillMode.PAUSE):
        return 0
    tokens = costs.tokens_within(step.seconds, riders=riders, context=context, remaining=remaining)
    if riders and (doubt := costs.doubt(tokens, riders=riders)):
        seconds = step.seconds * (1 - _DOUBT * doubt)
        tokens = costs.tokens_within(seconds, riders=riders, context=context, remaining=remaining)
    tokens = max(tokens // _TILE_TOKENS * _TILE_TOKENS, MIN_CHUNK_TOKENS)
    may_be_fast = remaining is None or remaining >= FAST_CHUNK_TOKENS
    if riders and may_be_fast and costs.knows_small_chunks and tokens < FAST_CHUNK_TOKENS <= costs.most_tokens(riders):
        small_s = costs.seconds(tokens, riders=riders, context=context)
        fast_s = costs.seconds(FAST_CHUNK_TOKENS, riders=riders, context=context)
        pays = tokens * fast_s**2 <= FAST_CHUNK_TOKENS * small_s**2
        if pays and fast_s <= small_s * costs.fast_attention_gain(riders=riders, context=context):
            tokens = FAST_CHUNK_TOKENS
    if remaining is not None and tokens >= FAST_CHUNK_TOKENS:
        tokens = _merged(costs, step, tokens, context, remaining)
    return min(tokens, config.max_batch_prefill_tokens)


def _merged(costs: ShardCosts, step: Step, tokens: int, context: int, remaining: int) -> int:
    """Return a size near ``tokens`` that leaves no small chunk of ``remaining``, unless decodes lose too much by it."""
    merged = _without_rest(tokens, remaining)
    if not step.riders or merged <= tokens:
        return merged
    own_s, merged_s = (costs.seconds(size, riders=step.riders, context=context) for size in (tokens, merged))
    most_s = _MOST_MERGED * step.seconds
    return merged if merged_s <= (most_s if own_s <= most_s else _MOST_MERGED * own_s) else tokens


def _without_rest(tokens: int, remaining: int) -> int:
    """Return a size near ``tokens`` that leaves no small chunk of ``remaining`` for the end."""
    if tokens >= 2 * FAST_CHUNK_TOKENS:
        return remaining if tokens < remaining < tokens + FAST_CHUNK_TOKENS else tokens
    chunks = math.ceil(remaining / tokens)
    if chunks > 1 and remaining // chunks < FAST_CHUNK_TOKENS:
        chunks -= 1
    return max(tokens, math.ceil(remaining / chunks))


def join_reason(config: SchedulerConfig, *, waiting: int, running: int, steps_since_prefill: int) -> JoinReason | None:
    """Return why a prefill of waiting requests may pause (or join) the running decodes now; None if it may not."""
    if config.mode is PrefillMode.MIXED:
        return JoinReason.CHUNKING
    if steps_since_prefill >= config.max_waiting_tokens:
        return JoinReason.WAIT_EXCEEDED
    return JoinReason.BACKPRESSURE if waiting >= config.waiting_served_ratio * running else None


class StepBudget:
    """``whole``: how many prompt tokens without context the step has room for when it is empty."""

    def __init__(self, shard: ShardAccount, config: SchedulerConfig, step: Step) -> None:
        self._shard = shard
        self._config = config
        self._step = step
        self.whole = self._left = self._tokens(context=0)
        self._least_chunk = max(1, min(_LEAST_CHUNK, self.whole))
        self._prompt_logprobs = shard.capacity.limits.max_prompt_logprob_tokens
        self._taken = 0
        # A span that cannot be cut takes the whole step, so that decodes wait for it.
        self.is_alone = False

    @property
    def is_late(self) -> bool:
        """Whether the step carries its decodes alone, since they have waited."""
        return self._step.is_late

    @property
    def has_tokens(self) -> bool:
        """Whether there is room for a chunk."""
        return self._left >= self._least_chunk

    def lacks(self, tokens: int) -> bool:
        """Whether there is no room for ``tokens`` without context, nor for a chunk."""
        return self._left < max(tokens, self._least_chunk)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether there is room for a chunk with prompt logprobs."""
        return self._prompt_logprobs > 0

    def _tokens(self, context: int, remaining: int | None = None) -> int:
        """Return how many tokens the whole step has for a prompt with ``context`` computed and ``remaining`` to do."""
        budget = chunk_budget(self._config, self._shard.costs, self._step, context=context, remaining=remaining)
        return min(budget, self._shard.capacity.limits.max_batch_tokens - self._step.riders)

    def lendable(self, resident: Resident, tokens: int, *, share: int) -> int:
        """Return how many tokens another prompt may have of the chunk of ``resident``, which has ``tokens``.

        It keeps 1 / ``share`` of the step. 0 if there are too few for a chunk.
        """
        least = min(tokens, max(self._whole_for(resident) // share, _TILE_TOKENS))
        kept = _to_border_before(resident, least)
        return tokens - kept if kept and tokens - kept >= _TILE_TOKENS else 0

    def lend(self, resident: Resident, tokens: int, wanted: int, *, most: int) -> int:
        """Let another prompt have ``wanted`` tokens of the chunk of ``resident``, which has ``tokens``.

        Return how many fewer it has: not more than ``most``, which are lendable.
        """
        whole = self._whole_for(resident)
        lacking = max(wanted, self._least_chunk) - self._left
        lent = math.ceil(lacking * whole / self.whole / _TILE_TOKENS) * _TILE_TOKENS
        lent = tokens - _to_border_before(resident, tokens - min(lent, most))
        self._left += max(self._least_chunk, lent * self.whole // whole)
        self._taken -= lent
        if resident.sequence.needs_prompt_logprobs:
            self._prompt_logprobs += lent
        return lent

    def _whole_for(self, resident: Resident) -> int:
        return self._tokens(resident.computed, self._shard.checkpoints.chunk_end(resident) - resident.computed)

    def take(self, resident: Resident, *, leaving: int = 0) -> int:
        """Return the size of the chunk that the prompt of ``resident`` gets; 0 if there is no room for any.

        ``leaving``: tokens without context that are left for others.
        """
        if self._left - leaving < self._least_chunk:
            return 0
        remaining = self._shard.checkpoints.chunk_end(resident) - resident.computed
        whole = self._tokens(resident.computed, remaining)
        tokens = _without_single(max(self._least_chunk, (self._left - leaving) * whole // self.whole), remaining)
        sequence = resident.sequence
        needs_logprobs = sequence.needs_prompt_logprobs
        if needs_logprobs:
            tokens = min(tokens, self._prompt_logprobs)
        if sequence.spec.media is not None:
            tokens = self._with_media(resident, sequence.spec.media, tokens, remaining)
        if tokens > 0:
            self._left -= math.ceil(tokens * self.whole / whole)
            self._taken += tokens
            if needs_logprobs:
                self._prompt_logprobs -= tokens
        return max(0, tokens)

    def can_begin(self, sequence: Sequence, cached: int) -> bool:
        """Whether ``sequence`` can begin behind its first ``cached`` tokens, if any prompt can."""
        media = sequence.spec.media
        if media is None or not media.atomic:
            return True
        cells = media.border_behind(cached) - cached
        if sequence.needs_prompt_logprobs and cells > self._prompt_logprobs:
            return False
        return not self._taken or cells <= self._room

    @property
    def _room(self) -> int:
        """How many more tokens the shard computes in the step, however long that takes."""
        return self._shard.capacity.limits.max_batch_tokens - self._step.riders - self._taken

    def _with_media(self, resident: Resident, media: PromptMedia, tokens: int, remaining: int) -> int:
        """Return the size of a chunk of about ``tokens``, by what may be cut of ``media``."""
        start = resident.computed
        if resident.sequence.losses:
            # Maybe the shard can keep no two media.
            tokens = int(min(tokens, media.second_behind(start) - start))
        if not media.atomic or tokens <= 0:
            return tokens
        room = self._room
        if not self._taken and media.border_behind(start) - start > room:
            room += self._step.riders
            self.is_alone = True
        if resident.sequence.needs_prompt_logprobs:
            room = min(room, self._prompt_logprobs)
        tokens = to_border(resident, tokens, room)
        return tokens + 1 if remaining - tokens == 1 and tokens < room else tokens


def to_border(resident: Resident, tokens: int, room: int) -> int:
    """Return how many tokens a chunk of ``resident`` has that may end after ``tokens``, but not within some media.

    It ends before, or if that leaves nothing, behind the first span; 0 if there is no ``room`` for that.
    """
    media, start = resident.sequence.spec.media, resident.computed
    if media is None or tokens <= 0:
        return tokens
    end = media.border(start + tokens)
    if end <= start:
        end = media.border_behind(start)
    return end - start if end - start <= room else 0


def _to_border_before(resident: Resident, tokens: int) -> int:
    """Return how many of the next ``tokens`` of ``resident`` a chunk has that may end there; 0 if none."""
    start = resident.computed
    return max(0, resident.sequence.border(start + tokens) - start)


def _without_single(tokens: int, remaining: int) -> int:
    """Return at most ``tokens`` of ``remaining``, so that none of them is left alone.

    A token that is computed alone may round otherwise than in a chunk, and greedy answers would depend on the chunks.
    """
    return tokens - 1 if remaining - tokens == 1 and tokens > 2 else min(tokens, remaining)
