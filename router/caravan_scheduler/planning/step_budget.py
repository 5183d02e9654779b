"""How many prompt tokens a step has room for, shared out to one prompt after another."""

import math

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.core.prompt_media import PromptMedia
from caravan_scheduler.planning.chunking import Step, chunk_budget
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.resident import Resident

# A step with fewer tokens left takes no other prompt: a chunk of three neither is nor leaves a single token.
_LEAST_CHUNK = 3


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

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether there is room for a chunk with prompt logprobs."""
        return self._prompt_logprobs > 0

    def _tokens(self, context: int, remaining: int | None = None) -> int:
        """Return how many tokens the whole step has for a prompt with ``context`` computed and ``remaining`` to do."""
        budget = chunk_budget(self._config, self._shard.costs, self._step, context=context, remaining=remaining)
        return min(budget, self._shard.capacity.limits.max_batch_tokens - self._step.riders)

    def take(self, resident: Resident) -> int:
        """Return the size of the chunk that the prompt of ``resident`` gets; 0 if there is no room for any."""
        if not self.has_tokens:
            return 0
        remaining = self._shard.checkpoints.chunk_end(resident) - resident.computed
        whole = self._tokens(resident.computed, remaining)
        tokens = _without_single(max(self._least_chunk, self._left * whole // self.whole), remaining)
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


def _without_single(tokens: int, remaining: int) -> int:
    """Return at most ``tokens`` of ``remaining``, so that none of them is left alone.

    A token that is computed alone may round otherwise than in a chunk, and greedy answers would depend on the chunks.
    """
    return tokens - 1 if remaining - tokens == 1 and tokens > 2 else min(tokens, remaining)
