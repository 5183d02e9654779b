"""Limits that result from the operator's flags and the model together."""

from dataclasses import dataclass

from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ModelFacts

# A text with more bytes per token is refused without tokenizing it. Only unusual texts have more, such as many spaces.
BYTES_PER_TOKEN = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The smaller of the operator's and the model's limit, for each limit."""

    max_total_tokens: int
    max_input_tokens: int
    max_top_n_tokens: int
    max_prompt_bytes: int
    max_request_new_tokens: int


def bounds_of(limits: Limits, model: ModelFacts) -> Bounds:
    """Combine the limits of the operator and the model. ``max_input_tokens`` leaves room for at least one new token."""
    total = min(limits.max_total_tokens or model.max_sequence_tokens, model.max_sequence_tokens)
    return Bounds(
        max_total_tokens=total,
        max_input_tokens=min(limits.max_input_tokens or total - 1, total - 1),
        max_top_n_tokens=min(limits.max_top_n_tokens, model.max_top_n_tokens),
        max_prompt_bytes=min(limits.max_prompt_bytes or BYTES_PER_TOKEN * total, model.max_tokenize_bytes),
        max_request_new_tokens=limits.max_request_new_tokens or limits.max_best_of * total,
    )
