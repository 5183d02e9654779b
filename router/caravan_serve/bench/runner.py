"""Runs one workload against one server and collects the report."""

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp
from rich.console import Console

from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.cpu_time import cpu_seconds, with_children
from caravan_serve.bench.dialects import Api, dialect_of
from caravan_serve.bench.load import closed_loop, open_loop, poisson_arrivals
from caravan_serve.bench.progress import progress
from caravan_serve.bench.request import Asked
from caravan_serve.bench.stall import StallResult, run_stall
from caravan_serve.bench.statistics import Summary, summarise
from caravan_serve.bench.workloads import Phase, Shape, Workload, phases, stall_plan, warm_up


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The options of a run. ``rate`` is in arrivals per second; None means the closed loop.

    Outputs are greedy if ``drawn`` is None.
    """

    url: str
    api: Api = Api.COMPLETIONS
    model: str = "default"
    api_key: str | None = None
    workload: Workload = Workload.PLAIN
    shape: Shape = field(default_factory=Shape)
    rate: float | None = None
    asked: Asked = field(default_factory=Asked)
    warmup: int = 1
    timeout_s: float = 600.0
    pids: tuple[int, ...] = ()
    pid_children: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU time of the load generator, and of the watched server processes if there are any."""

    client_s: float
    server_s: float | None
    cpu_us_per_output_token: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """The figures of one phase and the CPU time it took."""

    name: str
    summary: Summary
    cpu: CpuUse


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The result of a run: ``stall`` for the workload of that name, ``phases`` for all others."""

    workload: str
    api: str
    shape: Shape
    rate: float | None
    phases: tuple[PhaseReport, ...] = ()
    stall: StallResult | None = None

    @property
    def completed(self) -> int:
        """The number of requests that completed."""
        if self.stall is not None:
            return 0 if self.stall.failures else 1
        return sum(phase.summary.completed for phase in self.phases)


class WarmUpError(Exception):
    """A warm-up request failed, so nothing was measured."""


async def run_bench(config: BenchConfig, console: Console) -> BenchReport:
    """Warm the server up, then run the phases of the workload one after the other."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key is not None else {}
    # SseClient has its own time limit. The pool must not queue requests, which would delay their sending. Each request
    # gets its own connection, because a server that closes an idle one may do so just when the next request is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        client = SseClient(
            session=session,
            base_url=config.url.rstrip("/"),
            dialect=dialect_of(config.api, model=config.model, asked=config.asked),
            timeout_s=config.timeout_s,
        )
        for request in warm_up(config.shape, config.warmup):
            result = await client.run(request)
            if result.failure is not None:
                message = f"the warm-up request failed ({result.failure.kind}): {result.failure.message}"
                raise WarmUpError(message)
        if config.workload is Workload.STALL:
            console.print("stall: streams start, then the long prompt lands", highlight=False)
            stall = await run_stall(client, stall_plan(config.shape))
            return BenchReport(workload=config.workload, api=config.api, shape=config.shape, rate=None, stall=stall)
        reports = [await _run_phase(phase, client, config, console) for phase in phases(config.workload, config.shape)]
        return BenchReport(
            workload=config.workload, api=config.api, shape=config.shape, rate=config.rate, phases=tuple(reports)
        )


async def _run_phase(phase: Phase, client: SseClient, config: BenchConfig, console: Console) -> PhaseReport:
    # Reading /proc for many processes takes a while, so it happens in a thread.
    pids = await asyncio.to_thread(with_children, config.pids) if config.pid_children else config.pids
    server_before = await asyncio.to_thread(cpu_seconds, pids)
    client_before = time.process_time()
    with progress(console, phase.name, len(phase.requests)) as on_done:
        if config.rate is None:
            concurrency = phase.concurrency or config.shape.concurrency
            results = await closed_loop(client, phase.requests, concurrency=concurrency, on_done=on_done)
        else:
            arrivals = poisson_arrivals(len(phase.requests), rate=config.rate, seed=config.shape.seed)
            results = await open_loop(client, phase.requests, arrivals=arrivals, on_done=on_done)
    client_s = time.process_time() - client_before
    server_s = await asyncio.to_thread(cpu_seconds, pids) - server_before if pids else None
    summary = summarise(results)
    # The tokens of failed requests cost CPU time too, so all delivered tokens count.
    delivered = sum(result.output_tokens for result in results)
    per_token = server_s * 1e6 / delivered if server_s is not None and delivered else None
    cpu = CpuUse(client_s=client_s, server_s=server_s, cpu_us_per_output_token=per_token)
    return PhaseReport(name=phase.name, summary=summary, cpu=cpu)
