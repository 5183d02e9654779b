"""Prints the report as tables, and writes it as JSON."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from caravan_serve.bench.runner import BenchReport, PhaseReport
from caravan_serve.bench.stall import StallResult
from caravan_serve.bench.statistics import Distribution


def print_report(console: Console, report: BenchReport) -> None:
    """Print the report as tables."""
    for phase in report.phases:
        _print_phase(console, phase, report)
    if report.stall is not None:
        _print_stall(console, report.stall)


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
