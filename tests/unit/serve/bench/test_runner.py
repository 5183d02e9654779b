"""A benchmark run: its command line, its load, its report."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from unit.serve.bench.conftest import ToyServer

from caravan_scheduler.core.generation import GenerationSpec
from caravan_serve.bench.cli import main, print_report
from caravan_serve.bench.dialects import Api
from caravan_serve.bench.request import Asked, DrawnTokens, ErrorKind
from caravan_serve.bench.runner import (
    BenchConfig,
    BenchReport,
    NoSuchProcessError,
    WarmUpError,
    cpu_seconds,
    poisson_arrivals,
    run_bench,
    with_children,
)
from caravan_serve.bench.workloads import Shape, Workload
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import EOS_TOKEN, MODEL, ScriptedEngine, Step, count_up, word

GENERATING = (Api.COMPLETIONS, Api.GENERATE)


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


OWN_SHAPE = Shape(words=5, tokens=6, requests=4, concurrency=2)


LARGE_MODEL = replace(MODEL, max_sequence_tokens=4096)


def end_after_two_tokens(spec: GenerationSpec) -> Sequence[Step]:
    """The script of a model whose third token ends the sequence, unless the request demands more tokens."""
    demands_more = spec.stopping.ignore_eos or spec.stopping.min_tokens == spec.stopping.max_new_tokens
    return count_up(spec) if demands_more else [word(" a"), word(" b"), EOS_TOKEN]


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_is_accepted_and_every_token_is_counted(api: Api) -> None:
    async with serving(ScriptedEngine()) as service:
        report = await run_bench(BenchConfig(url=service.url, api=api, shape=OWN_SHAPE), Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.ended_early) == (4, {}, 0)
    assert summary.output_tokens == 4 * 6
    assert summary.token_source == "usage"
    assert summary.prompt_tokens > 0
    assert all(not stream.spec.sampling.temperature for stream in service.engine.streams)


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_can_run_the_stall_workload(api: Api) -> None:
    engine = ScriptedEngine(model=LARGE_MODEL, step_s=0.001)
    config = BenchConfig(url="", api=api, workload=Workload.STALL, shape=Shape(words=9, tokens=4))
    async with serving(engine) as service:
        report = await run_bench(replace(config, url=service.url), Console(file=io.StringIO()))
    assert report.stall is not None
    assert report.stall.failures == ()


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_demands_the_exact_length(api: Api) -> None:
    async with serving(ScriptedEngine(script=end_after_two_tokens)) as service:
        report = await run_bench(BenchConfig(url=service.url, api=api, shape=OWN_SHAPE), Console(file=io.StringIO()))
    assert report.phases[0].summary.output_tokens == 4 * 6
    assert report.phases[0].summary.ended_early == 0


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_can_draw_tokens(api: Api) -> None:
    asked = Asked(drawn=DrawnTokens(temperature=0.8, top_k=40, top_p=0.95))
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, api=api, shape=OWN_SHAPE, asked=asked, warmup=0)
        await run_bench(config, Console(file=io.StringIO()))
    for stream in service.engine.streams:
        sampling = stream.spec.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.95)


async def test_whole_replies_have_every_token_and_what_was_asked_for() -> None:
    asked = Asked(drawn=DrawnTokens(temperature=0.8, min_p=0.1), whole=True, logprobs=2)
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, shape=OWN_SHAPE, asked=asked, warmup=0)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.output_tokens) == (4, {}, 4 * 6)
    for stream in service.engine.streams:
        assert (stream.spec.sampling.min_p, stream.spec.sampling.top_n_tokens) == (0.1, 2)


async def test_texts_are_embedded_and_their_tokens_counted() -> None:
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, api=Api.EMBEDDINGS, shape=OWN_SHAPE, warmup=0)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.output_tokens, summary.ended_early) == (4, {}, 0, 0)
    assert summary.prompt_tokens > 0


async def test_generate_streams_that_a_server_ends_early_are_completed_and_reported() -> None:
    """TGI does not know ``min_new_tokens``."""
    async with serving(ScriptedEngine(script=lambda _: [word(" a"), word(" b"), EOS_TOKEN])) as service:
        config = BenchConfig(url=service.url, api=Api.GENERATE, shape=OWN_SHAPE)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.ended_early) == (4, {}, 4)
    assert summary.output_tokens == 4 * 3
    printed = io.StringIO()
    print_report(Console(file=printed, width=120), report)
    assert "with fewer tokens than asked for" in printed.getvalue()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "localhost:1"),
        ("--url", "http://127.0.0.1:1", "--rate", "0"),
        ("--url", "http://127.0.0.1:1", "--concurrency", "0"),
        ("--url", "http://127.0.0.1:1", "--api", "generate", "--workload", "n"),
        ("--url", "http://127.0.0.1:1", "--top-k", "40"),
        ("--url", "http://127.0.0.1:1", "--min-p", "0.1"),
        ("--url", "http://127.0.0.1:1", "--api", "generate", "--whole"),
        ("--url", "http://127.0.0.1:1", "--workload", "stall", "--whole"),
        ("--url", "http://127.0.0.1:1", "--workload", "decode", "--api", "embeddings"),
        ("--url", "http://127.0.0.1:1", "--temperature", "1", "--api", "embeddings"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


async def test_the_report_is_printed_and_written_as_json(
    toy: ToyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.json"
    arguments = ["--url", toy.url, "--requests", "4", "--tokens", "3", "--pid", str(os.getpid()), "--json", str(path)]
    assert await asyncio.to_thread(main, arguments) == 0
    report = json.loads(await asyncio.to_thread(path.read_text))
    assert report["phases"][0]["summary"]["output_tokens"] == 12
    assert report["phases"][0]["cpu"]["server_s"] >= 0
    printed = capsys.readouterr().out
    assert "plain: 4/4 requests" in printed
    assert "TTFT" in printed


async def test_a_run_without_a_completed_request_shows_the_errors_and_fails(
    toy: ToyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.mode = "429"
    arguments = ["--url", toy.url, "--requests", "2", "--warmup", "0"]
    assert await asyncio.to_thread(main, arguments) == 1
    assert "2 x overloaded (429), the first: HTTP 429" in capsys.readouterr().out


async def test_the_stall_workload_prints_the_worst_gap(toy: ToyServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["--url", toy.url, "--workload", "stall", "--words", "9"]) == 0
    assert "worst gap" in capsys.readouterr().out


def test_a_process_that_does_not_run_is_an_error() -> None:
    with pytest.raises(NoSuchProcessError, match="is not running"):
        cpu_seconds([2**22 + 1])


def test_the_children_of_a_process_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in with_children([os.getpid()])
        assert cpu_seconds([child.pid]) >= 0
    finally:
        child.communicate(b"\n")
