"""Both loops, the client and the runner, against a small server on a real port."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from unit.serve.bench.conftest import ToyServer

from caravan_serve.bench.request import ErrorKind
from caravan_serve.bench.runner import BenchConfig, BenchReport, WarmUpError, poisson_arrivals, run_bench
from caravan_serve.bench.workloads import Shape, Workload

SHAPE = Shape(words=5, tokens=4, requests=12, concurrency=3)


async def bench(toy: ToyServer, **changes: object) -> BenchReport:
    config = BenchConfig(url=toy.url, shape=SHAPE, warmup=0)
    return await run_bench(replace(config, **changes), Console(file=io.StringIO()))  # type: ignore[arg-type]


async def test_closed_loop_keeps_its_concurrency(toy: ToyServer) -> None:
    toy.step_s = 0.01
    report = await bench(toy)
    summary = report.phases[0].summary
    assert (summary.completed, summary.output_tokens, summary.prompt_tokens) == (12, 48, 84)
    assert summary.token_source == "usage"
    assert toy.most_running == 3
    assert summary.itl_s is not None
    assert summary.itl_s.count == 36


async def test_open_loop_does_not_wait_for_answers(toy: ToyServer) -> None:
    toy.step_s = 0.05
    report = await bench(toy, rate=200.0)
    summary = report.phases[0].summary
    assert summary.completed == 12
    assert toy.most_running > 3
    assert summary.duration_s >= poisson_arrivals(12, rate=200.0, seed=0)[-1]


async def test_a_run_over_generate_stream_counts_every_token(toy: ToyServer) -> None:
    report = await bench(toy, api="generate")
    assert report.phases[0].summary.output_tokens == 48


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("429", ErrorKind.OVERLOADED),
        ("422", ErrorKind.REFUSED),
        ("500", ErrorKind.SERVER),
        ("error", ErrorKind.STREAM),
        ("garbage", ErrorKind.STREAM),
        ("cut", ErrorKind.CUT),
        ("short", ErrorKind.SHORT),
        ("hang", ErrorKind.TIMEOUT),
    ],
)
async def test_each_kind_of_failure_is_counted_by_its_name(toy: ToyServer, mode: str, kind: ErrorKind) -> None:
    toy.mode = mode
    report = await bench(toy, timeout_s=0.2 if mode == "hang" else 30.0)
    assert report.phases[0].summary.errors == {kind.value: 12}
    assert report.completed == 0


async def test_a_missing_server_is_a_connection_failure() -> None:
    config = BenchConfig(url="http://127.0.0.1:9", shape=SHAPE, warmup=0)
    report = await run_bench(config, Console(file=io.StringIO()))
    assert report.phases[0].summary.errors == {ErrorKind.CONNECTION.value: 12}


async def test_a_failing_warm_up_stops_the_run(toy: ToyServer) -> None:
    toy.mode = "422"
    with pytest.raises(WarmUpError, match="n is too large"):
        await bench(toy, warmup=1)


async def test_the_tokens_of_every_choice_are_counted(toy: ToyServer) -> None:
    report = await bench(toy, workload=Workload.N, shape=replace(SHAPE, n=5))
    assert report.phases[0].summary.output_tokens == 12 * 4 * 5


async def test_the_shared_prefix_workload_has_two_phases(toy: ToyServer) -> None:
    report = await bench(toy, workload=Workload.SHARED_PREFIX)
    assert [phase.name for phase in report.phases] == ["cold", "warm"]


async def test_the_stall_workload_measures_gaps_and_stops_the_streams(toy: ToyServer) -> None:
    report = await bench(toy, workload=Workload.STALL, shape=Shape(words=20, tokens=8))
    stall = report.stall
    assert stall is not None
    assert stall.failures == ()
    assert stall.outlived
    assert 0.002 <= stall.worst_gap_s < 30
    assert stall.landed_ttft_s is not None


async def test_the_stall_workload_reports_streams_that_fail(toy: ToyServer) -> None:
    toy.mode = "error"
    report = await bench(toy, workload=Workload.STALL)
    assert report.stall is not None
    assert "the cache is full" in " ".join(report.stall.failures)
    assert report.completed == 0
