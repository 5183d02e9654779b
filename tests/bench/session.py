"""One server's turn: start it, run a group against it, end it."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.machine import busy_seconds
from bench.rows import Group, Report, Run
from bench.servers import Contender, Product, Running, serving
from caravan_router.bench.cpu_time import cpu_seconds, with_children

_RUN_TIMEOUT_S = 1200
_DISTURBED_SHARE = 0.05


def turn(contender: Contender, group: Group, *, seed: int) -> dict[str, Report]:
    """The reports by run; a run that gave none is left out, and says so."""
    reports: dict[str, Report] = {}
    with serving(contender, group.setting) as server:
        router = router_pids(server.pid) if contender.product is Product.CARAVAN else ()
        for run in group.runs:
            print(f"  {contender}: {run.name} ...", end="", flush=True)
            others = _OthersWatch(server.pid)
            report = _measure(server, run, router, seed)
            if report is None:
                continue
            report["others_cpu_share"] = others.share()
            reports[run.name] = report
            figures = [figure.read(report) for figure in run.figures]
            words = ", ".join("-" if figure is None else f"{figure:.1f}" for figure in figures)
            share = report["others_cpu_share"]
            disturbed = f" (disturbed: {share:.0%} of the CPU went to others)" if share > _DISTURBED_SHARE else ""
            print(f" {words}{disturbed}", flush=True)
    return reports


def router_pids(serve_pid: int) -> tuple[int, ...]:
    """The processes of ``caravan serve`` that are no shard."""
    return tuple(pid for pid in with_children((serve_pid,)) if not _is_shard(pid))


def _is_shard(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"caravan_shard" in command or b"caravan-shard" in command


def _measure(server: Running, run: Run, router: tuple[int, ...], seed: int) -> Report | None:
    """A process of its own: the load generator must not share an interpreter with whatever else runs here."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "caravan_router.bench", "--url", server.url, "--seed", str(seed)]
        command += [*run.arguments, "--json", str(path)]
        for pid in router:
            command += ["--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            print(f" no end within {_RUN_TIMEOUT_S} s", flush=True)
            return None
        if not path.is_file():
            print(f" failed: {(done.stdout + done.stderr).strip()[-500:]}", flush=True)
            return None
        report: Report = json.loads(path.read_text())
        return report


class _OthersWatch:
    """What share of the machine's CPU went to neither the server nor the load generator since it was made."""

    def __init__(self, server_pid: int) -> None:
        self._server = with_children((server_pid,))
        self._wall = time.monotonic()
        self._ours = self._our_seconds()
        self._busy = busy_seconds()

    def share(self) -> float:
        others = busy_seconds() - self._busy - (self._our_seconds() - self._ours)
        return max(0.0, others) / (time.monotonic() - self._wall) / (os.cpu_count() or 1)

    def _our_seconds(self) -> float:
        ended_children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cpu_seconds(self._server) + ended_children.ru_utime + ended_children.ru_stime
