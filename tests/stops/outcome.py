"""What a stop of a shard has shown, and what many of them have."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# What a program writes of a fault in C code, and of an exception that nobody handles.
_FAULTS = ("Fatal Python error", "Traceback (most recent call last)", "terminate called")


@dataclass
class Stopped:
    """A stop. ``seconds``: from the request to end until the process has ended."""

    way: str
    model: str
    seconds: float = 0.0
    exit_name: str = ""
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        calls = Counter[str]()
        for (_kind, end), count in self.ends.items():
            calls[end] += count
        found = ", ".join(f"{count} {end}" for end, count in sorted(calls.items()))
        return f"{self.way:8} {self.model:8} exit {self.exit_name}, {self.seconds:5.2f} s, calls: {found}"


def faults_in(log: str) -> list[str]:
    """Return the lines of ``log`` that tell of a fault, each with those behind it."""
    lines = log.splitlines()
    return [
        "\n".join(lines[place : place + 30])
        for place, line in enumerate(lines)
        if any(fault in line for fault in _FAULTS)
    ]


def summary(stops: Sequence[Stopped]) -> str:
    """Return the figures of ``stops``, by the way in which the shards were stopped, and of their calls by kind."""
    lines = []
    for way in dict.fromkeys(stop.way for stop in stops):
        these = [stop for stop in stops if stop.way == way]
        seconds = [stop.seconds for stop in these]
        exits = Counter(stop.exit_name for stop in these)
        lines.append(
            f"{way}: {len(these)} stops, exits {dict(exits)}, seconds median {statistics.median(seconds):.2f}, "
            f"longest {max(seconds):.2f}"
        )
    ends = Counter[tuple[str, str]]()
    for stop in stops:
        ends.update(stop.ends)
    for kind in sorted({kind for kind, _ in ends}):
        counts = {end: count for (of_kind, end), count in sorted(ends.items()) if of_kind == kind}
        lines.append(f"  {kind}: {', '.join(f'{count} {end}' for end, count in counts.items())}")
    return "\n".join(lines)
