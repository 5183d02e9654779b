"""Measures the bare engine with llama-batched-bench: no HTTP, no sampling."""

import json
import subprocess

from bench.bounds import Attention, EngineRun, EngineTime
from bench.contenders import Common
from bench.paths import BenchError, peer

_TIMEOUT_S = 1200


def engine_time(common: Common, run: EngineRun, cells: int, attention: Attention) -> EngineTime:
    """Measure one run, in the split layout, which is the faster one."""
    command = [str(peer("llama-batched-bench")), "-m", str(common.model), "-c", str(cells), "-t", str(common.threads)]
    command += [
        "-npp",
        str(run.prompt_tokens),
        "-ntg",
        str(run.output_tokens),
        "-npl",
        str(run.sequences),
        "-fa",
        attention.value,
    ]
    command += ["--output-format", "jsonl", *(["-pps"] if run.shared else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            return EngineTime(prefill_s=row["t_pp"], decode_s=row["t_tg"])
    message = f"llama-batched-bench gave no result for {run}:\n{done.stderr[-1000:]}"
    raise BenchError(message)
