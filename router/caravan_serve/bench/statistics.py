"""Summarises results in figures."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from caravan_serve.bench.request import RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The distribution of a duration; all values but ``count`` are in seconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a phase. Rates count completed requests only, over the time from the first send to the last end.

    ``completed`` includes the ``ended_early`` requests, which delivered fewer tokens than they asked for because their
    API cannot demand an exact length. ``error_samples`` has the first message of each kind of error.
    """

    requests: int
    completed: int
    ended_early: int
    errors: dict[str, int]
    error_samples: dict[str, str]
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    token_source: str
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    steady_tokens_per_s: float | None
    ttft_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return a percentile of ascending values, interpolated between the two nearest ranks as numpy does by default."""
    assert ordered, "there are no values"
    rank = fraction * (len(ordered) - 1)
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return the distribution of ``values``; None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.50),
        p95=percentile(ordered, 0.95),
        p99=percentile(ordered, 0.99),
        max=ordered[-1],
    )


def summarise(results: Sequence[RequestResult]) -> Summary:
    """Return all figures of a phase. Latencies count completed requests only."""
    completed = [result for result in results if result.failure is None]
    failures = [result.failure for result in results if result.failure is not None]
    duration = max((r.ended for r in results), default=0.0) - min((r.scheduled for r in results), default=0.0)
    prompt_tokens = sum(result.prompt_tokens or 0 for result in completed)
    output_tokens = sum(result.output_tokens for result in completed)
    per_second = 1 / duration if duration > 0 else 0.0
    return Summary(
        requests=len(results),
        completed=len(completed),
        ended_early=sum(result.ended_early for result in completed),
        errors=dict(Counter(failure.kind.value for failure in failures)),
        error_samples={failure.kind.value: failure.message for failure in reversed(failures)},
        duration_s=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        token_source="+".join(sorted({result.token_source.value for result in completed})),
        output_tokens_per_s=output_tokens * per_second,
        total_tokens_per_s=(prompt_tokens + output_tokens) * per_second,
        requests_per_s=len(completed) * per_second,
        steady_tokens_per_s=steady_rate(completed),
        ttft_s=distribution([r.first_token - r.scheduled for r in completed if r.first_token is not None]),
        itl_s=distribution([gap for result in completed for times in result.token_times for gap in _gaps(times)]),
        e2e_s=distribution([result.ended - result.scheduled for result in completed]),
    )


def steady_rate(results: Sequence[RequestResult]) -> float | None:
    """Return the tokens per second while all streams decode: from the last first token to the first last token.

    Return None if the streams do not overlap. Each stream counts from its first to its last token in that window, so
    that gaps across the borders of the window do not distort the rate.
    """
    streams = [times for result in results for times in result.token_times if len(times) > 1]
    if not streams:
        return None
    begin = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    rate = 0.0
    for times in streams:
        inside = [when for when in times if begin <= when <= end]
        if len(inside) < 2 or inside[-1] <= inside[0]:
            return None
        rate += (len(inside) - 1) / (inside[-1] - inside[0])
    return rate


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]
