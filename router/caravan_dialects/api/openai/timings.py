"""How long a generation takes, and how far its prompt is, in llama-server's form."""

from caravan_dialects.api.generation.progress import PromptProgress
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.schema import ProgressShown, Timings


def timings_of(run: Run, predicted: int) -> Timings:
    """Return the times so far of a run that has a token; ``predicted``: the tokens that count."""
    times, timings = run.times, run.timings()
    prompt_s = 0.0 if times.started is None or times.first_token is None else times.first_token - times.started
    predicted_s = max(0.0, timings.inference_s - prompt_s)
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
