"""How the figures of a row are read from the reports of the load generator."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from bench.bounds import BoundOf
from bench.load import Report

# Returns None if the report has no such figure, or if a request failed.
Read: TypeAlias = Callable[[Report], float | None]


class Better(StrEnum):
    """Whether higher or lower figures are better."""

    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table."""

    label: str
    read: Read
    better: Better = Better.HIGHER
    bound: BoundOf | None = None


def rate(label: str, key: str, bound: BoundOf | None = None, *, phase: int = 0) -> Figure:
    """Return the figure of a rate in tokens per second."""
    return Figure(label=f"{label}tokens/s", read=_summary(key, phase), bound=bound)


def ttft(label: str, *, phase: int = 0) -> Figure:
    """Return the figure of the median time to the first token."""
    return Figure(label=f"{label}TTFT p50, ms", read=_ttft_ms(phase), better=Better.LOWER)


def ttft_share(label: str, *, phase: int, of: int) -> Figure:
    """Return the figure of a phase's median time to the first token, as a share of another phase's."""

    def read(report: Report) -> float | None:
        ours, theirs = _ttft_ms(phase)(report), _ttft_ms(of)(report)
        return None if ours is None or theirs is None else 100 * ours / theirs

    return Figure(label=f"{label}, %", read=read, better=Better.LOWER)


def stall(label: str, key: str) -> Figure:
    """Return the figure of a time of the workload ``stall``."""

    def read(report: Report) -> float | None:
        result = report["stall"]
        return None if result["failures"] or result[key] is None else float(result[key] * 1e3)

    return Figure(label=f"{label}, ms", read=read, better=Better.LOWER)


def agents(label: str, key: str, statistic: str) -> Figure:
    """Return the figure of a time of the workload ``agents``, in seconds."""

    def read(report: Report) -> float | None:
        result = report["agents"]
        return None if result["failures"] or result[key] is None else float(result[key][statistic])

    return Figure(label=f"{label}, s", read=read, better=Better.LOWER)


def _computed_percent(report: Report) -> float | None:
    result = report["agents"]
    share = result["computed_share"]
    return None if result["failures"] or share is None else float(100 * share)


def _completed_percent(report: Report) -> float | None:
    summary = report["phases"][0]["summary"]
    return float(100 * summary["completed"] / summary["requests"])


def _cpu_per_token(report: Report) -> float | None:
    value = report["phases"][0]["cpu"]["cpu_us_per_output_token"]
    return None if value is None else float(value)


COMPUTED = Figure(label="prompt tokens computed, %", read=_computed_percent, better=Better.LOWER)
COMPLETED = Figure(label="completed, %", read=_completed_percent)
# The report counts the processor time of the processes that `bench.fleet` names: see `Contender.counts_shards`.
ROUTER_CPU = Figure(label="router CPU per token, µs", read=_cpu_per_token, better=Better.LOWER)
SERVER_CPU = Figure(label="CPU per token, µs", read=_cpu_per_token, better=Better.LOWER)


def mean_prompt_tokens(report: Report) -> int | None:
    """Return the mean length of the prompts of the first phase; None if no reply has said it."""
    summary = report["phases"][0]["summary"] if report["phases"] else {"prompt_tokens": 0, "completed": 0}
    return round(summary["prompt_tokens"] / summary["completed"]) if summary["prompt_tokens"] else None


def failures(report: Report) -> list[str]:
    """Return one message for each kind of failure."""
    if report["stall"] is not None:
        return list(report["stall"]["failures"])
    if report["agents"] is not None:
        return list(report["agents"]["failures"])
    return [message for phase in report["phases"] for message in phase["summary"]["error_samples"].values()]


def _summary(key: str, phase: int) -> Read:
    def read(report: Report) -> float | None:
        summary = report["phases"][phase]["summary"]
        return None if summary["errors"] or summary[key] is None else float(summary[key])

    return read


def _ttft_ms(phase: int) -> Read:
    def read(report: Report) -> float | None:
        summary = report["phases"][phase]["summary"]
        return None if summary["errors"] or summary["ttft_s"] is None else float(summary["ttft_s"]["p50"] * 1e3)

    return read
