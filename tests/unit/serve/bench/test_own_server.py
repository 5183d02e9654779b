"""The bench against Caravan's own HTTP layer: what one sends, the other must accept."""

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from caravan_scheduler.core.generation import GenerationSpec
from caravan_serve.bench.cli import print_report
from caravan_serve.bench.dialects import Api
from caravan_serve.bench.request import Asked, DrawnTokens
from caravan_serve.bench.runner import BenchConfig, run_bench
from caravan_serve.bench.workloads import Shape, Workload
from caravan_testing.http_server import serving
from caravan_testing.scripted_engine import EOS_TOKEN, MODEL, ScriptedEngine, Step, count_up, word

GENERATING = (Api.COMPLETIONS, Api.GENERATE)
SHAPE = Shape(words=5, tokens=6, requests=4, concurrency=2)
LARGE_MODEL = replace(MODEL, max_sequence_tokens=4096)


def end_after_two_tokens(spec: GenerationSpec) -> Sequence[Step]:
    """The script of a model whose third token ends the sequence, unless the request demands more tokens."""
    demands_more = spec.stopping.ignore_eos or spec.stopping.min_tokens == spec.stopping.max_new_tokens
    return count_up(spec) if demands_more else [word(" a"), word(" b"), EOS_TOKEN]


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_is_accepted_and_every_token_is_counted(api: Api) -> None:
    async with serving(ScriptedEngine()) as service:
        report = await run_bench(BenchConfig(url=service.url, api=api, shape=SHAPE), Console(file=io.StringIO()))
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
        report = await run_bench(BenchConfig(url=service.url, api=api, shape=SHAPE), Console(file=io.StringIO()))
    assert report.phases[0].summary.output_tokens == 4 * 6
    assert report.phases[0].summary.ended_early == 0


@pytest.mark.parametrize("api", GENERATING)
async def test_every_api_can_draw_tokens(api: Api) -> None:
    asked = Asked(drawn=DrawnTokens(temperature=0.8, top_k=40, top_p=0.95))
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, api=api, shape=SHAPE, asked=asked, warmup=0)
        await run_bench(config, Console(file=io.StringIO()))
    for stream in service.engine.streams:
        sampling = stream.spec.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.95)


async def test_whole_replies_have_every_token_and_what_was_asked_for() -> None:
    asked = Asked(drawn=DrawnTokens(temperature=0.8, min_p=0.1), whole=True, logprobs=2)
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, shape=SHAPE, asked=asked, warmup=0)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.output_tokens) == (4, {}, 4 * 6)
    for stream in service.engine.streams:
        assert (stream.spec.sampling.min_p, stream.spec.sampling.top_n_tokens) == (0.1, 2)


async def test_texts_are_embedded_and_their_tokens_counted() -> None:
    async with serving(ScriptedEngine()) as service:
        config = BenchConfig(url=service.url, api=Api.EMBEDDINGS, shape=SHAPE, warmup=0)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.output_tokens, summary.ended_early) == (4, {}, 0, 0)
    assert summary.prompt_tokens > 0


async def test_generate_streams_that_a_server_ends_early_are_completed_and_reported() -> None:
    """TGI does not know ``min_new_tokens``."""
    async with serving(ScriptedEngine(script=lambda _: [word(" a"), word(" b"), EOS_TOKEN])) as service:
        config = BenchConfig(url=service.url, api=Api.GENERATE, shape=SHAPE)
        report = await run_bench(config, Console(file=io.StringIO()))
    summary = report.phases[0].summary
    assert (summary.completed, summary.errors, summary.ended_early) == (4, {}, 4)
    assert summary.output_tokens == 4 * 3
    printed = io.StringIO()
    print_report(Console(file=printed, width=120), report)
    assert "with fewer tokens than asked for" in printed.getvalue()
