"""What replies of OpenAI's routes count: tokens from the cache, of pictures and of sounds, draft tokens, and times."""

from collections.abc import Sequence

import msgspec

from caravan_dialects.api.generation.progress import PromptProgress
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.schema import (
    CompletionTokensDetails,
    DraftTokens,
    ProgressShown,
    PromptTokensDetails,
    Timings,
)
from caravan_proto.messages.results import DraftSource
from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.media import Picture, Sound

_Count = int | msgspec.UnsetType


def completion_details(
    runs: Sequence[Run], thought_tokens: int | None = None
) -> CompletionTokensDetails | msgspec.UnsetType:
    """Return the sums over ``runs``; unset if there were no draft tokens and ``thought_tokens`` is None."""
    sources: dict[str, DraftTokens] = {}
    for count in (count for run in runs for count in run.drafts):
        before = sources.get(count.source.value, DraftTokens(0, 0))
        sources[count.source.value] = DraftTokens(before.drafted + count.drafted, before.accepted + count.accepted)
    if not sources and thought_tokens is None:
        return msgspec.UNSET
    predicted = sources.get(DraftSource.PREDICTION.value, DraftTokens(0, 0))
    thoughts = msgspec.UNSET if thought_tokens is None else thought_tokens
    return CompletionTokensDetails(predicted.accepted, predicted.drafted - predicted.accepted, sources, thoughts)


def media_tokens(spec: GenerationSpec) -> tuple[_Count, _Count]:
    """Return how many tokens of the prompt are those of pictures, and of sounds; unset where there are none."""
    pictures = sounds = 0
    if spec.media is not None:
        for span in spec.media.spans:
            medium = spec.media.contents[span.media_id]
            pictures += span.count if isinstance(medium, Picture) else 0
            sounds += span.count if isinstance(medium, Sound) else 0
    return pictures or msgspec.UNSET, sounds or msgspec.UNSET


def prompt_details(run: Run) -> PromptTokensDetails:
    """Return the details of a prompt whose first choice is ``run``, which computes the prompt for the others."""
    return PromptTokensDetails(run.cached_tokens, *media_tokens(run.spec))


def timings_of(run: Run, predicted: int) -> Timings:
    """Return the times so far of a run that has a token; ``predicted``: the tokens that count."""
    timings = run.timings()
    prompt_s, predicted_s = timings.prefill_s, timings.decode_s
    computed = len(run.spec.prompt) - run.cached_tokens
    # The first token comes with the end of the prompt.
    steps = max(0, predicted - 1)
    return Timings(
        cache_n=run.cached_tokens,
        prompt_n=computed,
        prompt_ms=1000 * prompt_s,
        prompt_per_token_ms=1000 * prompt_s / max(1, computed),
        prompt_per_second=computed / prompt_s if prompt_s else 0.0,
        predicted_n=predicted,
        predicted_ms=1000 * predicted_s,
        predicted_per_token_ms=1000 * predicted_s / max(1, steps),
        predicted_per_second=steps / predicted_s if predicted_s else 0.0,
    )


def timings_at(progress: PromptProgress) -> Timings:
    """Return the times of a run that has no token yet."""
    computed, ms = progress.processed - progress.cache, progress.time_ms
    return Timings(
        cache_n=progress.cache,
        prompt_n=computed,
        prompt_ms=ms,
        prompt_per_token_ms=ms / max(1, computed),
        prompt_per_second=1000 * computed / ms if ms else 0.0,
        predicted_n=0,
        predicted_ms=0.0,
        predicted_per_token_ms=0.0,
        predicted_per_second=0.0,
    )


def progress_shown(progress: PromptProgress) -> ProgressShown:
    """Return the progress of a prompt as replies show it."""
    return ProgressShown(
        total=progress.total, cache=progress.cache, processed=progress.processed, time_ms=progress.time_ms
    )
