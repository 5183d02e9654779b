"""The stall run: streams decode, a long prompt lands on them; what do the running streams feel?"""

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise

from caravan_router.bench.client_sse import SseClient
from caravan_router.bench.request import RequestResult, StreamRecord
from caravan_router.bench.statistics import Distribution, distribution
from caravan_router.bench.workloads import StallPlan

_POLL_S = 0.01
# Tokens each stream shows before the prompt lands, so that there is a calm to compare with.
_CALM_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StallResult:
    """Gaps are between tokens of one running stream; the worst is over all of them, from the landing on.

    ``outlived`` tells whether every stream still ran when the prompt's first token came: if not, the worst gap is
    a lower bound.
    """

    streams: int
    prompt_tokens: int | None
    landed_ttft_s: float | None
    worst_gap_s: float
    gaps_before_s: Distribution | None
    gaps_after_s: Distribution | None
    outlived: bool
    failures: tuple[str, ...]


async def run_stall(client: SseClient, plan: StallPlan) -> StallResult:
    """Start the streams, land the prompt when all have begun, stop the streams when it has ended."""
    records = [StreamRecord() for _ in plan.streams]
    tasks = [
        asyncio.create_task(client.run(request, record=record))
        for request, record in zip(plan.streams, records, strict=True)
    ]
    try:
        while not all(record.event_tokens >= _CALM_TOKENS for record in records):
            if any(task.done() for task in tasks):
                return _not_begun(tasks, records)
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


def _not_begun(tasks: list[asyncio.Task[RequestResult]], records: list[StreamRecord]) -> StallResult:
    return StallResult(
        streams=len(records),
        prompt_tokens=None,
        landed_ttft_s=None,
        worst_gap_s=0.0,
        gaps_before_s=None,
        gaps_after_s=None,
        outlived=False,
        failures=("a stream ended before the prompt could land", *_failures(tasks)),
    )


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
            # A stream that is silent to the very end shows no later token: its silence counts all the same.
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
