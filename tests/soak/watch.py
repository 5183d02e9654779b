"""Samples the resources that a running server uses, and detects growth."""

import os
import re
import statistics
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_testing.metrics_text import total
from caravan_testing.serve_process import Served
from caravan_testing.waiting import DEADLINE_S

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Memory, open descriptors and threads of the router and its shards, KV cells by use, and counters."""

    router_bytes: int
    shard_bytes: int
    descriptors: int
    threads: int
    used_cells: float
    cached_cells: float
    total_cells: float
    queued: float
    swapped: float
    swaps: float
    recomputes: float
    failures: float

    @property
    def cache_use(self) -> float:
        """Share of KV cells that are not empty."""
        return (self.used_cells + self.cached_cells) / self.total_cells


def take(served: Served) -> Sample:
    """Take a sample."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=DEADLINE_S) as response:
        metrics = response.read().decode()

    dropped = total(metrics, "tgi_request_failure", 'err="dropped"')
    return Sample(
        router_bytes=resident_bytes(served.process.pid),
        shard_bytes=sum(map(resident_bytes, served.shard_pids())),
        descriptors=served.descriptors(),
        threads=sum(len(os.listdir(f"/proc/{pid}/task")) for pid in [served.process.pid, *served.shard_pids()]),
        used_cells=total(metrics, "caravan_kv_cells_used"),
        cached_cells=total(metrics, "caravan_kv_cells_cached"),
        total_cells=total(metrics, "caravan_kv_cells"),
        queued=total(metrics, "tgi_queue_size"),
        swapped=total(metrics, "caravan_sequences_swapped"),
        swaps=total(metrics, "caravan_request_preemptions_total", 'how="swap"'),
        recomputes=total(metrics, "caravan_request_preemptions_total", 'how="recompute"'),
        failures=total(metrics, "tgi_request_failure") - dropped,
    )


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    found = re.search(r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, pid
    return int(found[1]) * 1024


def line(sample: Sample) -> str:
    """Return the sample as one line of text."""
    return (
        f"rss {sample.router_bytes / _MIB:.1f} + {sample.shard_bytes / _MIB:.1f} MiB  fds {sample.descriptors}  "
        f"threads {sample.threads}  cells {sample.used_cells:.0f} + {sample.cached_cells:.0f} of "
        f"{sample.total_cells:.0f}  queued {sample.queued:.0f}, swapped {sample.swapped:.0f}  "
        f"preemptions {sample.swaps:.0f} swap, {sample.recomputes:.0f} recompute"
    )


# Allowed growth of each value: a share of the value plus an amount. Descriptors vary with the number of clients.
_LIMITS: tuple[tuple[str, Callable[[Sample], float], float, float], ...] = (
    ("memory of the router", lambda sample: sample.router_bytes, 0.03, 10 * _MIB),
    ("memory of the shards", lambda sample: sample.shard_bytes, 0.03, 10 * _MIB),
    ("descriptors", lambda sample: sample.descriptors, 0.1, 4),
    ("threads", lambda sample: sample.threads, 0, 1),
)


def growth(samples: Sequence[Sample]) -> list[str]:
    """Return the values whose median grew from the second quarter to the last. The first quarter is the warm-up."""
    quarter = len(samples) // 4
    complaints = []
    for name, value, part, amount in _LIMITS:
        before = statistics.median(map(value, samples[quarter : 2 * quarter]))
        after = statistics.median(map(value, samples[-quarter:]))
        if after > before * (1 + part) + amount:
            complaints.append(f"{name}: {before:.0f} in the second quarter, {after:.0f} in the last")
    return complaints
