"""Runs one workload against one server and collects the report.

Requests are sent in a closed loop, with a fixed number running, or in an open loop, at random times; the workload
`stall` measures how much a long prompt delays streams that already decode. Progress is a bar on a terminal, plain
lines elsewhere. CPU seconds are from /proc (Linux).
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from caravan_serve.bench.agents import Chat, agent_plans
from caravan_serve.bench.agents_run import AgentsResult, run_agents
from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.dialects import Api, dialect_of
from caravan_serve.bench.request import Asked, BenchRequest, RequestResult, StreamRecord
from caravan_serve.bench.statistics import Distribution, Summary, distribution, summarise
from caravan_serve.bench.workloads import LoadPhase, Shape, StallPlan, Workload, phases, seeded, stall_plan, warm_up

_POLL_S = 0.01
# Tokens that each stream delivers before the long prompt is sent, to compare with.
_CALM_TOKENS = 16
_LINE_EVERY_S = 5.0


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


class NoSuchProcessError(Exception):
    """A process to watch does not run."""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the user and system time of the processes since their start, all threads included."""
    ticks = 0
    for pid in pids:
        fields = _stat_fields(pid)
        # Fields 14 and 15 of proc(5); the split begins at field 3.
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def with_children(pids: Iterable[int]) -> tuple[int, ...]:
    """Return the processes and all their descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int(_stat_fields(int(entry.name))[1])
            except NoSuchProcessError:
                continue  # The process ended while /proc was being listed.
            parents.setdefault(parent, []).append(int(entry.name))
    found = list(dict.fromkeys(pids))
    for pid in found:  # The list grows during the loop.
        found += [child for child in parents.get(pid, []) if child not in found]
    return tuple(found)


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third on. The second is a name that may contain spaces."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError) as error:
        message = f"process {pid} is not running: pass the pid of a running server"
        raise NoSuchProcessError(message) from error
    return text.rpartition(")")[2].split()


OnDone: TypeAlias = Callable[[RequestResult], None]


async def closed_loop(
    client: SseClient, requests: Sequence[BenchRequest], *, concurrency: int, on_done: OnDone
) -> list[RequestResult]:
    """Run ``concurrency`` workers, each of which sends its next request when the previous one has ended."""
    waiting = iter(requests)
    results: list[RequestResult] = []

    async def work() -> None:
        for request in waiting:
            result = await client.run(request)
            results.append(result)
            on_done(result)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return results


async def open_loop(
    client: SseClient, requests: Sequence[BenchRequest], *, arrivals: Sequence[float], on_done: OnDone
) -> list[RequestResult]:
    """Send each request at its time in ``arrivals``, in seconds from now, however many are still running."""
    start = time.perf_counter()
    results: list[RequestResult] = []

    async def send(request: BenchRequest, scheduled: float) -> None:
        result = await client.run(request, scheduled=scheduled)
        results.append(result)
        on_done(result)

    async with asyncio.TaskGroup() as group:
        for request, arrival in zip(requests, arrivals, strict=True):
            await asyncio.sleep(start + arrival - time.perf_counter())
            group.create_task(send(request, start + arrival))
    return results


def poisson_arrivals(count: int, *, rate: float, seed: int) -> tuple[float, ...]:
    """Return ``count`` arrival times in seconds, at ``rate`` per second on average."""
    rng = seeded(f"arrivals {seed}")
    arrivals: list[float] = []
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(now)
    return tuple(arrivals)


@contextmanager
def progress(console: Console, name: str, total: int) -> Iterator[OnDone]:
    """Show the progress of a phase. Yield the function to call at the end of each request."""
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # Redrawing takes CPU time from the server under test, so do it only twice a second.
        with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda _: bar.advance(task)
        return
    yield _Lines(console, name, total).done


class _Lines:
    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console = console
        self._name = name
        self._total = total
        self._done = 0
        self._failed = 0
        self._last_line = time.monotonic()

    def done(self, result: RequestResult) -> None:
        self._done += 1
        self._failed += result.failure is not None
        now = time.monotonic()
        if self._done < self._total and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        failed = f", {self._failed} failed" if self._failed else ""
        self._console.print(f"{self._name}: {self._done}/{self._total} requests{failed}", highlight=False)


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
    """The result of a run: ``stall`` and ``agents`` for the workloads of those names, ``phases`` for all others."""

    workload: str
    api: str
    shape: Shape
    rate: float | None
    phases: tuple[PhaseReport, ...] = ()
    stall: StallResult | None = None
    agents: AgentsResult | None = None

    @property
    def completed(self) -> int:
        """The number of requests that completed."""
        if self.stall is not None:
            return 0 if self.stall.failures else 1
        if self.agents is not None:
            return self.agents.completed
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
        if config.workload is Workload.AGENTS:
            console.print("agents: sessions start, beside a chat", highlight=False)
            agents = await run_agents(client, agent_plans(config.shape), Chat(config.shape.seed))
            return BenchReport(workload=config.workload, api=config.api, shape=config.shape, rate=None, agents=agents)
        reports = [await _run_phase(phase, client, config, console) for phase in phases(config.workload, config.shape)]
        return BenchReport(
            workload=config.workload, api=config.api, shape=config.shape, rate=config.rate, phases=tuple(reports)
        )


async def _run_phase(phase: LoadPhase, client: SseClient, config: BenchConfig, console: Console) -> PhaseReport:
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
