"""The profiles of the comparison: how often rows are measured, and on how old servers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``age_prompts`` prompts of ``age_words`` words age each server.

    ``between`` is the number of other prompts that come before a prefix returns.
    """

    models: tuple[str, ...]
    rounds: int
    age_prompts: int
    age_words: int
    between: int


PROFILES = {
    "quick": Profile(models=("smollm2-q4_1",), rounds=3, age_prompts=16, age_words=300, between=50),
    "full": Profile(
        models=("smollm2-q4_1", "smollm2-q4_0", "gemma-3-270m"), rounds=5, age_prompts=48, age_words=400, between=1000
    ),
}
