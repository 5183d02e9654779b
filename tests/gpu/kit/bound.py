"""Measures the bare engine with llama-batched-bench, for 1, 8 and 32 sequences in one start, which loads once."""

import json
import subprocess
import sys
from collections import defaultdict
from statistics import median

from bench.paths import peer
from gpu.kit.job import Job, keep, kept, run_stage
from gpu.kit.models import MEASURED
from gpu.kit.rows import STREAMS, common

# About those of the rows: short prompts, long outputs.
_PROMPT_TOKENS = 32
_UNIT_S = 90.0


def run(job: Job) -> None:
    """Measure the models that have not been measured yet."""
    rounds, output_tokens = (1, 32) if job.rehearsal else (3, 256)
    for name in MEASURED:
        if name in kept("bound"):
            continue
        job.need(_UNIT_S)
        shared = common(job, name)
        cells = max(STREAMS) * (_PROMPT_TOKENS + output_tokens)
        command = [str(peer("llama-batched-bench")), "-m", str(shared.model), "-t", str(shared.threads), "-fa", "on"]
        command += ["-c", str(cells), "-npp", str(_PROMPT_TOKENS), "-ntg", str(output_tokens)]
        command += ["-npl", ",".join(map(str, STREAMS * rounds)), "--output-format", "jsonl"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=job.left_s(), check=True)
        rates: dict[str, list[float]] = defaultdict(list)
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                measured = json.loads(line)
                rates[str(measured["pl"])].append(measured["pl"] * output_tokens / measured["t_tg"])
        found = {streams: round(median(values), 1) for streams, values in rates.items()}
        print(f"{name}: {found} tokens/s", flush=True)
        keep("bound", name, {"model": name, "tokens_per_s": found})


if __name__ == "__main__":
    sys.exit(run_stage(run))
