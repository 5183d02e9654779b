"""The workload ``stall``: measures how much a long prompt delays streams that are already decoding."""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.request import RequestResult, StreamRecord
from caravan_serve.bench.statistics import Distribution, distribution
from caravan_serve.bench.workloads import StallPlan

_POLL_S = 0.01
# Tokens that each stream delivers before the long prompt is sent, to compare with.
_CALM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StallResult:
    """Gaps are the times between tokens of one stream, before and after the long prompt was sent.

    ``worst_gap_s`` is the largest gap afterwards. It is a lower bound unless all streams ``outlived`` the prefill, that
    is, still ran when the first token of the long prompt's output arrived.
    """

    streams: int
    failures: tuple[str, ...]
    prompt_tokens: int | None = None
    landed_ttft_s: float | None = None
    worst_gap_s: float = 0.0
    gaps_before_s: Distribution | None = None
    gaps_after_s: Distribution | None = None
    outlived: bool = False


async def run_stall(client: SseClient, plan: StallPlan) -> StallResult:
    """Start the streams, send the long prompt once all of them decode, and stop them when its output has ended."""
    records = [StreamRecord() for _ in plan.streams]
    tasks = [
        asyncio.create_task(client.run(request, record=record))
        for request, record in zip(plan.streams, records, strict=True)
    ]
    try:
        while not all(record.event_tokens >= _CALM_TOKENS for record in records):
            if any(task.done() for task in tasks):
                failures = ["a stream ended before the prompt could land", *_failures(tasks)]
                return StallResult(streams=len(records), failures=tuple(failures))
            await asyncio.sleep(_POLL_S)
        landed_at = time.perf_counter()
        landed = await client.run(plan.intruder)
        ended_at = time.perf_counter()
        failures = [landed.failure.message] if landed.failure is not None else []
        failures += _failures(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return _result(records, landed, landed_at, ended_at, tuple(failures))


def _failures(tasks: list[asyncio.Task[RequestResult]]) -> list[str]:
    results = [task.result() for task in tasks if task.done()]
    return [result.failure.message for result in results if result.failure is not None]


def _result(
    records: list[StreamRecord],
    landed: RequestResult,
    landed_at: float,
    ended_at: float,
    failures: tuple[str, ...],
) -> StallResult:
    before: list[float] = []
    after: list[float] = []
    outlived = True
    for record in records:
        times = record.token_times[0]
        gaps = [(later, later - earlier) for earlier, later in pairwise(times)]
        before += [gap for later, gap in gaps if later <= landed_at]
        after += [gap for later, gap in gaps if later > landed_at]
        if record.ended:
            outlived = outlived and times[-1] >= (landed.first_token or ended_at)
        else:
            # A stream that is silent until the end has no later token, but its silence counts as a gap.
            after.append(ended_at - times[-1])
    ttft = None if landed.first_token is None else landed.first_token - landed.scheduled
    return StallResult(
        streams=len(records),
        prompt_tokens=landed.prompt_tokens,
        landed_ttft_s=ttft,
        worst_gap_s=max(after, default=0.0),
        gaps_before_s=distribution(before),
        gaps_after_s=distribution(after),
        outlived=outlived,
        failures=failures,
    )
