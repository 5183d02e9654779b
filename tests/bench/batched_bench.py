"""Measures the bare engine with llama-batched-bench: no HTTP, no sampling."""

import json
import subprocess
from dataclasses import dataclass

from bench.paths import BenchError, peer
from bench.servers import Layout, Setting

# The sizes of the load generator's workload `decode`: 16 words in, 192 tokens out.
_PROMPT_TOKENS = 24
_OUTPUT_TOKENS = 192
_TIMEOUT_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRate:
    """Tokens per second of the whole batch."""

    batch: int
    layout: Layout
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def engine_rate(setting: Setting, layout: Layout, batch: int) -> EngineRate:
    """Measure one batch size. Each needs a run of its own, because the number of sequences shapes the cache."""
    command = [str(peer("llama-batched-bench")), "-m", str(setting.model), "-c", str(setting.cells)]
    command += ["-t", str(setting.threads), "-npp", str(_PROMPT_TOKENS), "-ntg", str(_OUTPUT_TOKENS)]
    command += ["-npl", str(batch), "--output-format", "jsonl"]
    command += ["-kvu"] if layout is Layout.UNIFIED else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            return EngineRate(
                batch=batch, layout=layout, prefill_tokens_per_s=row["speed_pp"], decode_tokens_per_s=row["speed_tg"]
            )
    message = f"llama-batched-bench gave no result at batch {batch}, {layout}:\n{done.stderr[-1000:]}"
    raise BenchError(message)
