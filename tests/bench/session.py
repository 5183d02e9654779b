"""Starts one server, runs a group of measurements against it, and ends it."""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from bench.disturbance import least_disturbed, remark
from bench.rows import Group, Report, Run
from bench.servers import Contender, Product, Running, serving
from caravan_router.bench.cpu_time import with_children

_RUN_TIMEOUT_S = 1200


def turn(contender: Contender, group: Group, *, seed: int, idle_limit_s: float) -> dict[str, Report]:
    """Return the reports by name of the run. A run without a report prints why and is left out."""
    reports: dict[str, Report] = {}
    with serving(contender, group.setting) as server:
        router = router_pids(server.pid) if contender.product is Product.CARAVAN else ()
        for run in group.runs:
            print(f"  {contender}: {run.name} ...", end="", flush=True)
            report, share = least_disturbed(
                partial(_measure, server, run, router, seed),
                server=with_children((server.pid,)),
                idle_limit_s=idle_limit_s,
            )
            if report is None:
                continue
            report["others_cpu_share"] = share
            reports[run.name] = report
            figures = [figure.read(report) for figure in run.figures]
            words = ", ".join("-" if figure is None else f"{figure:.1f}" for figure in figures)
            print(f" {words}{remark(share)}", flush=True)
    return reports


def router_pids(serve_pid: int) -> tuple[int, ...]:
    """Return the processes of ``caravan serve`` that are not shards."""
    return tuple(pid for pid in with_children((serve_pid,)) if not _is_shard(pid))


def _is_shard(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"caravan_shard" in command or b"caravan-shard" in command


def _measure(server: Running, run: Run, router: tuple[int, ...], seed: int, attempt: int) -> Report | None:
    """Run the load generator in its own process, so that nothing else shares its interpreter. None if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        # Each attempt has other prompts, so that the server's cache cannot help the next one.
        prompts = seed + 1000 * attempt
        command = [sys.executable, "-m", "caravan_router.bench", "--url", server.url, "--seed", str(prompts)]
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
