"""What all generating routes check alike, and what comes out of it. Parses: nobody after it checks again."""

import math
from collections.abc import Sequence

from caravan_router.core.engine import Engine, ModelFacts, TokenizedText
from caravan_router.http.generation.bounds import Bounds
from caravan_router.http.generation.rules import (
    EmptyPromptError,
    EmptyStopError,
    NotStrictlyPositiveError,
    OutOfRangeError,
    PromptTooLongError,
    StopTooLongError,
    TokenIdError,
    TooManyBytesError,
    TooManyNewTokensError,
    TooManyStopsError,
    TotalTooLongError,
)
from caravan_router.http.limits import Limits

MAX_TOP_K = 2**31 - 1
# Below it, dividing logits overflows a float32: it is greedy in all but name, and told so.
GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0


def check_range(field: str, value: float | None, low: float, high: float) -> None:
    """Both ends allowed; None is not checked."""
    if value is not None and not low <= value <= high:
        raise OutOfRangeError(field, low, high, value)


def check_temperature(field: str, value: float | None, *, zero_allowed: bool) -> None:
    if value is not None and (value < 0 or (value == 0 and not zero_allowed)):
        raise NotStrictlyPositiveError(field, value)
    check_range(field, value, 0.0, MAX_TEMPERATURE)


def check_repetition_penalty(field: str, value: float | None) -> None:
    check_positive(field, value)
    check_range(field, value, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)


def check_positive(field: str, value: float | None) -> None:
    """None is not checked."""
    if value is not None and value <= 0:
        raise NotStrictlyPositiveError(field, value)


def check_stops(stops: Sequence[str], limits: Limits) -> tuple[str, ...]:
    """The stop strings, if they are few, short and not empty."""
    if len(stops) > limits.max_stop_sequences:
        raise TooManyStopsError(limits.max_stop_sequences, len(stops))
    for stop in stops:
        if not stop:
            raise EmptyStopError
        size = len(stop.encode())
        if size > limits.max_stop_bytes:
            raise StopTooLongError(limits.max_stop_bytes, size)
    return tuple(stops)


async def tokenize_prompt(engine: Engine, field: str, text: str, bounds: Bounds) -> TokenizedText:
    """The tokens of a text; its bytes are counted first, since tokenizing takes time by the byte."""
    if not text:
        raise EmptyPromptError(field)
    size = len(text.encode())
    if size > bounds.max_prompt_bytes:
        raise TooManyBytesError(field, bounds.max_prompt_bytes, size)
    return await engine.queries.tokenize(text)


def check_token_ids(field: str, token_ids: Sequence[int], limit: int, model: ModelFacts) -> None:
    """Of a prompt that comes as tokens, at most ``limit``."""
    if not token_ids:
        raise EmptyPromptError(field)
    # Before each is looked at: there may be a million.
    if len(token_ids) > limit:
        raise PromptTooLongError(field, limit, len(token_ids))
    for token_id in token_ids:
        if not 0 <= token_id < model.vocabulary_size:
            raise TokenIdError(field, model.vocabulary_size, token_id)


def fit(prompt: Sequence[int], max_new: int | None, bounds: Bounds, names: tuple[str, str]) -> int:
    """New tokens to generate: as asked, or all that fit. ``names``: what the client calls prompt and new tokens."""
    field, new_field = names
    if not prompt:
        raise EmptyPromptError(field)
    if max_new is not None and len(prompt) + max_new > bounds.max_total_tokens:
        raise TotalTooLongError(field, new_field, bounds.max_total_tokens, len(prompt), max_new)
    if len(prompt) > bounds.max_input_tokens:
        raise PromptTooLongError(field, bounds.max_input_tokens, len(prompt))
    return max_new if max_new is not None else bounds.max_total_tokens - len(prompt)


def check_new_tokens(field: str, generations: int, max_new: int, bounds: Bounds) -> None:
    """``max_new``: of each generation of the request. What no single one may have is for `fit` to refuse."""
    given = generations * min(max_new, bounds.max_total_tokens)
    if given > bounds.max_request_new_tokens:
        raise TooManyNewTokensError(field, bounds.max_request_new_tokens, given)


def effective_temperature(temperature: float) -> float:
    """0 for greedy."""
    assert math.isfinite(temperature), temperature
    return temperature if temperature >= GREEDY_TEMPERATURE else 0.0
