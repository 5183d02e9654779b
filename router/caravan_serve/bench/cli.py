"""The command line of ``caravan bench``, and its report as tables and as JSON."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caravan_proto.command_line import Parser
from caravan_serve.bench.agents_run import AgentsResult
from caravan_serve.bench.dialects import Api
from caravan_serve.bench.request import Asked, DrawnTokens
from caravan_serve.bench.runner import (
    BenchConfig,
    BenchReport,
    NoSuchProcessError,
    PhaseReport,
    StallResult,
    WarmUpError,
    run_bench,
)
from caravan_serve.bench.statistics import Distribution
from caravan_serve.bench.workloads import Shape, Workload


def print_report(console: Console, report: BenchReport) -> None:
    """Print the report as tables."""
    for phase in report.phases:
        _print_phase(console, phase, report)
    if report.stall is not None:
        _print_stall(console, report.stall)
    if report.agents is not None:
        _print_agents(console, report.agents)


def write_json(path: Path, report: BenchReport) -> None:
    """Write the whole report as JSON, with times in seconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def _print_phase(console: Console, phase: PhaseReport, report: BenchReport) -> None:
    summary = phase.summary
    loop = f"concurrency {report.shape.concurrency}" if report.rate is None else f"{report.rate:g} requests/s offered"
    table = Table(title=f"{phase.name}, {loop}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("completed", f"{summary.completed} of {summary.requests} in {summary.duration_s:.1f} s")
    if summary.ended_early:
        table.add_row("  with fewer tokens than asked for", str(summary.ended_early))
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    if summary.steady_tokens_per_s is not None:
        table.add_row("  while all streams decode", f"{summary.steady_tokens_per_s:.1f}")
    table.add_row("total tokens/s", f"{summary.total_tokens_per_s:.1f}")
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row("prompt + output tokens", f"{summary.prompt_tokens} + {summary.output_tokens}")
    table.add_row("tokens counted by", summary.token_source)
    table.add_row("client CPU", f"{phase.cpu.client_s:.2f} s")
    if phase.cpu.server_s is not None:
        table.add_row("server CPU", f"{phase.cpu.server_s:.2f} s")
    if phase.cpu.cpu_us_per_output_token is not None:
        table.add_row("server CPU per output token", f"{phase.cpu.cpu_us_per_output_token:.0f} us")
    console.print(table)
    latencies = (("TTFT", summary.ttft_s), ("ITL", summary.itl_s), ("E2E", summary.e2e_s))
    _print_latencies(console, latencies)
    for kind, count in summary.errors.items():
        console.print(f"[red]{count} x {kind}[/red], the first:", escape(summary.error_samples[kind]), highlight=False)


def _print_stall(console: Console, stall: StallResult) -> None:
    table = Table(title=f"a long prompt lands on {stall.streams} streams", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("worst gap between tokens from then on", f"{stall.worst_gap_s * 1e3:.0f} ms")
    if stall.landed_ttft_s is not None:
        table.add_row("TTFT of the long prompt", f"{stall.landed_ttft_s * 1e3:.0f} ms")
    if stall.prompt_tokens is not None:
        table.add_row("its tokens", str(stall.prompt_tokens))
    console.print(table)
    _print_latencies(console, (("ITL before", stall.gaps_before_s), ("ITL after", stall.gaps_after_s)))
    if not stall.outlived:
        console.print("[yellow]streams ended before the prompt's first token: the worst gap is a lower bound[/yellow]")
    for failure in stall.failures:
        console.print("[red]failed:[/red]", escape(failure), highlight=False)


def _print_agents(console: Console, result: AgentsResult) -> None:
    table = Table(title=f"{result.agents} agents beside a chat", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    if result.session_s is not None:
        table.add_row("mean session, tools included", f"{result.session_s.mean:.1f} s")
    table.add_row("requests of agents", f"{result.completed} of {result.requests} in {result.duration_s:.1f} s")
    table.add_row("prompt + output tokens", f"{result.prompt_tokens} + {result.output_tokens}")
    if result.computed_share is not None:
        table.add_row("share of prompt tokens computed", f"{result.computed_share:.2f}")
    console.print(table)
    latencies = (
        ("TTFT, first", result.first_ttft_s),
        ("TTFT, after a tool", result.return_ttft_s),
        ("TTFT, chat", result.chat_ttft_s),
    )
    _print_latencies(console, latencies)
    for failure in result.failures:
        console.print("[red]failed:[/red]", escape(failure), highlight=False)


def _print_latencies(console: Console, rows: tuple[tuple[str, Distribution | None], ...]) -> None:
    table = Table("ms", "mean", "p50", "p95", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, spread in rows:
        if spread is not None:
            figures = (spread.mean, spread.p50, spread.p95, spread.p99, spread.max)
            table.add_row(name, *(f"{figure * 1e3:.1f}" for figure in figures))
    if table.row_count:
        console.print(table)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark. Return 0 if any request completed, 1 if none did; exit with 2 for a wrong command line."""
    parser = bench_parser()
    config, json_path = _config(parser, parser.parse_args(argv))
    console = Console(stderr=False)
    try:
        report = asyncio.run(run_bench(config, console))
    except (WarmUpError, NoSuchProcessError) as error:
        console.print(f"[red]caravan bench: {escape(str(error))}[/red]", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    print_report(console, report)
    if json_path is not None:
        write_json(json_path, report)
        console.print(f"written to {json_path}", highlight=False)
    return 0 if report.completed else 1


def bench_parser() -> Parser:
    """Return the parser of `caravan bench`."""
    parser = Parser(prog="caravan bench", description="Measure a server that speaks OpenAI's API or TGI's streams.")
    add = parser.add_argument
    add("--url", required=True, help="base address, for example http://127.0.0.1:3000")
    add(
        "--api",
        type=Api,
        choices=tuple(Api),
        default=Api.COMPLETIONS,
        help="completions: /v1/completions; generate: /generate_stream; embeddings: /v1/embeddings, of the prompts of"
        " the workload plain. Outputs have exactly --tokens tokens. TGI's own API cannot demand that; the report counts"
        " shorter outputs",
    )
    add("--model", default="default", help="model name sent to /v1/completions")
    add("--api-key", help="sent as a bearer token")
    add("--workload", type=Workload, choices=tuple(Workload), default=Workload.PLAIN, help="which prompts to send")
    add("--concurrency", type=_positive, default=8, help="closed loop: requests running at once, or agents (default 8)")
    add("--rate", type=_above_0, help="open loop: mean arrivals per second (Poisson), instead of the closed loop")
    add("--requests", type=_positive, help="requests per phase (default: the workload's)")
    add("--words", type=_positive, help="words per prompt (default: the workload's)")
    add("--tokens", type=_positive, help="output tokens per choice (default: the workload's)")
    add("--n", type=_positive, default=8, help="choices per prompt in the workload n (default 8)")
    add("--between", type=_positive, default=50, help="other prompts before prefixes return (default 50)")
    add("--temperature", type=_above_0, help="sample at this temperature (default: greedy decoding)")
    add("--top-k", type=_positive, help="needs --temperature (default: the server's)")
    add("--top-p", type=_above_0, help="needs --temperature (default: the server's)")
    add("--min-p", type=_above_0, help="needs --temperature and --api completions (default: the server's)")
    add("--whole", action="store_true", help="ask for whole replies instead of streams; needs --api completions")
    add("--logprobs", type=_positive, metavar="N", help="ask for N likely tokens with each; needs --api completions")
    add("--json-schema", metavar="SCHEMA", help="schema of the outputs, for servers that accept it as json_schema")
    add("--seed", type=int, default=0, help="seed of prompts and arrival times (default 0)")
    add("--warmup", type=int, default=1, help="short requests before the measurement (default 1)")
    add("--timeout", type=float, default=600.0, help="seconds until a request counts as failed (default 600)")
    add(
        "--pid",
        type=_positive,
        action="append",
        default=[],
        help="server process whose CPU time is counted; repeatable",
    )
    add("--pid-children", action="store_true", help="count the CPU time of all children of --pid too")
    add("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        message = f"must be at least 1, not {value}"
        raise argparse.ArgumentTypeError(message)
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if value <= 0:
        message = f"must be above 0, not {value:g}"
        raise argparse.ArgumentTypeError(message)
    return value


def _config(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[BenchConfig, Path | None]:
    if not args.url.startswith(("http://", "https://")):
        parser.error(f"--url must start with http:// or https://, not {args.url!r}")
    if args.temperature is None and (args.top_k, args.top_p, args.min_p) != (None, None, None):
        parser.error("--top-k, --top-p and --min-p need --temperature")
    if args.api is Api.EMBEDDINGS and (args.workload is not Workload.PLAIN or args.temperature is not None):
        parser.error("--api embeddings needs the workload plain, and samples no tokens")
    if args.api is not Api.COMPLETIONS and (
        args.whole or (args.min_p, args.logprobs, args.json_schema) != (None, None, None)
    ):
        parser.error("--whole, --min-p, --logprobs and --json-schema need --api completions")
    if args.whole and args.workload in (Workload.STALL, Workload.AGENTS):
        parser.error(f"the workload {args.workload} measures streams, and so has no --whole")
    if args.workload is Workload.AGENTS and args.api is not Api.COMPLETIONS:
        parser.error("the workload agents needs --api completions")
    own = (args.rate, args.requests, args.words, args.tokens)
    if args.workload is Workload.AGENTS and own != (None, None, None, None):
        parser.error("the workload agents has its own times and sizes: leave out --rate, --requests, --words, --tokens")
    if args.api is Api.GENERATE and args.workload is Workload.N:
        parser.error("the workload n needs --api completions: /generate_stream streams one choice alone")
    if args.pid and sys.platform != "linux":
        parser.error("--pid reads /proc, which only Linux has")
    shape = Shape(
        words=args.words,
        tokens=args.tokens,
        requests=args.requests,
        concurrency=args.concurrency,
        n=args.n,
        between=args.between,
        seed=args.seed,
    )
    drawn = None
    if args.temperature is not None:
        drawn = DrawnTokens(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    config = BenchConfig(
        url=args.url,
        api=args.api,
        model=args.model,
        api_key=args.api_key,
        workload=args.workload,
        shape=shape,
        rate=args.rate,
        asked=Asked(drawn=drawn, whole=args.whole, logprobs=args.logprobs, schema=args.json_schema),
        warmup=args.warmup,
        timeout_s=args.timeout,
        pids=tuple(args.pid),
        pid_children=args.pid_children,
    )
    return config, args.json
