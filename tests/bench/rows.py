"""The runs against each server, and the figures to take from their reports."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.servers import Layout, Setting

Report = dict[str, Any]


class Better(StrEnum):
    """Whether higher or lower figures are better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table. ``read`` returns None if the report has no such figure."""

    label: str
    read: Callable[[Report], float | None]
    better: Better = Better.HIGHER


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One call of the load generator; ``name`` is unique within a group."""

    name: str
    arguments: tuple[str, ...]
    figures: tuple[Figure, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Runs against a server of one setting, which is started once for all of them, in each of ``layouts``."""

    name: str
    setting: Setting
    runs: tuple[Run, ...]
    layouts: tuple[Layout, ...] = tuple(Layout)


def _phase(report: Report, phase: int) -> Report | None:
    phases: list[Report] = report["phases"]
    return phases[phase] if len(phases) > phase and phases[phase]["summary"]["completed"] else None


def _summary(key: str, phase: int = 0) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        found = _phase(report, phase)
        value = None if found is None else found["summary"][key]
        return None if value is None else float(value)

    return read


def _ms(key: str, point: str, phase: int = 0) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        found = _phase(report, phase)
        spread = None if found is None else found["summary"][key]
        return None if spread is None else spread[point] * 1e3

    return read


def _completed_percent(report: Report) -> float | None:
    summary = report["phases"][0]["summary"]
    return float(100 * summary["completed"] / summary["requests"])


def _stall_ms(key: str) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        stall = report["stall"]
        return None if stall["failures"] or stall[key] is None else stall[key] * 1e3

    return read


def _cpu_per_token(report: Report) -> float | None:
    value = report["phases"][0]["cpu"]["cpu_us_per_output_token"]
    return None if value is None else float(value)


def plain(concurrency: int, requests: int) -> Run:
    """Prompts of 100 words, 64 output tokens."""
    name = f"plain, concurrency {concurrency}"
    return Run(
        name=name,
        arguments=("--workload", "plain", "--concurrency", str(concurrency), "--requests", str(requests)),
        figures=(
            Figure(label=f"{name}: output tokens/s", read=_summary("output_tokens_per_s")),
            Figure(label=f"{name}: TTFT p50, ms", read=_ms("ttft_s", "p50"), better=Better.LOWER),
            Figure(label=f"{name}: ITL p50, ms", read=_ms("itl_s", "p50"), better=Better.LOWER),
            Figure(label=f"{name}: ITL p99, ms", read=_ms("itl_s", "p99"), better=Better.LOWER),
            Figure(label=f"{name}: router CPU per token, us", read=_cpu_per_token, better=Better.LOWER),
        ),
    )


def decode(batch: int) -> Run:
    """Short prompts and long outputs; the rate counts only the time while all streams decode."""
    name = f"decode, {batch} streams"
    return Run(
        name=name,
        arguments=("--workload", "decode", "--concurrency", str(batch)),
        figures=(Figure(label=f"{name}: tokens/s", read=_summary("steady_tokens_per_s")),),
    )


STALL = Run(
    name="stall",
    arguments=("--workload", "stall"),
    figures=(
        Figure(
            label="1,500 words land on 4 streams: worst gap, ms", read=_stall_ms("worst_gap_s"), better=Better.LOWER
        ),
        Figure(
            label="1,500 words land on 4 streams: their TTFT, ms", read=_stall_ms("landed_ttft_s"), better=Better.LOWER
        ),
    ),
)
SHARED_PREFIX = Run(
    name="shared-prefix",
    arguments=("--workload", "shared-prefix", "--concurrency", "8"),
    figures=tuple(
        figure
        for phase, state in enumerate(("cold", "warm"))
        for figure in (
            Figure(label=f"600 shared words, {state}: output tokens/s", read=_summary("output_tokens_per_s", phase)),
            Figure(
                label=f"600 shared words, {state}: TTFT p50, ms", read=_ms("ttft_s", "p50", phase), better=Better.LOWER
            ),
        )
    ),
)
N = Run(
    name="n",
    arguments=("--workload", "n", "--n", "8", "--concurrency", "1", "--requests", "2"),
    figures=(Figure(label="n = 8: output tokens/s", read=_summary("output_tokens_per_s")),),
)


def overload(state: str) -> Run:
    """16 requests of 600 words, 8 at a time, which need about 5,300 KV cells at once."""
    name = f"600 words, 8 at once, {state}"
    return Run(
        name=f"overload {state}",
        arguments=("--workload", "overload", "--concurrency", "8", "--requests", "16"),
        figures=(
            Figure(label=f"{name}: completed, %", read=_completed_percent),
            Figure(label=f"{name}: output tokens/s", read=_summary("output_tokens_per_s")),
        ),
    )
