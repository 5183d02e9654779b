"""Measures what is between two passes while 32 streams run: on the shard, in the router, and on the wire."""

import sys
import urllib.request
from typing import Any

from bench.load import load
from bench.rows import OVERHEAD_ROWS
from bench.servers import Running, serving
from gpu.kit.job import Job, keep, kept, run_stage
from gpu.kit.models import MEASURED
from gpu.kit.rows import KINDS, common, lineup, shorter

from caravan_serve.bench.runner import cpu_seconds
from caravan_testing.metrics_text import total

_STREAMS, _CELLS_PER_STREAM = 32, 1024
_UNIT_S = 60.0
# Times of a decode step, by the metric that sums them.
_TIMES = {
    "step": "caravan_step_duration_seconds",
    "forward": "caravan_step_forward_seconds",
    "sampling": "caravan_step_sample_seconds",
    "between": "caravan_step_overhead_seconds",
}


def run(job: Job) -> None:
    """Measure the models that have not been measured yet."""
    servers = lineup(_STREAMS, _STREAMS * _CELLS_PER_STREAM, ())
    for name in MEASURED:
        if name in kept("between"):
            continue
        job.need(_UNIT_S)
        found: dict[str, Any] = {"model": name}
        with serving(servers.ours, common(job, name)) as server:
            for kind in KINDS:
                (row,) = (each for each in OVERHEAD_ROWS if each.name == f"{kind}-streamed-{_STREAMS}")
                arguments = (*row.arguments, *shorter(job))
                load(server.url, arguments, seed=0)  # all that is made once is made
                found |= {kind: _measured(server, arguments)}
                print(name, kind, found[kind], flush=True)
        keep("between", name, found)


def _measured(server: Running, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return milliseconds of a step of the load, and how many steps it had."""
    router = server.router_pids()
    before, cpu = _sums(server.url), cpu_seconds(router)
    load(server.url, arguments, seed=1)
    after, cpu = _sums(server.url), cpu_seconds(router) - cpu
    steps = after["steps"] - before["steps"]
    milliseconds = {name: round(1e3 * (after[name] - before[name]) / steps, 3) for name in _TIMES}
    return {"steps": int(steps), **milliseconds, "router_cpu": round(1e3 * cpu / steps, 3)}


def _sums(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    sums = {name: total(text, f"{metric}_sum", 'method="decode"') for name, metric in _TIMES.items()}
    return {"steps": total(text, f"{_TIMES['step']}_count", 'method="decode"'), **sums}


if __name__ == "__main__":
    sys.exit(run_stage(run))
