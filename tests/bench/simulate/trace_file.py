"""Traces as JSON lines in the format of Mooncake's open traces (arXiv 2407.00079).

One request a line: ``timestamp`` in milliseconds, ``input_length`` and ``output_length`` in tokens, and ``hash_ids``: a
number for each block of the prompt, which stands for the block and all blocks before it. Equal numbers are equal
prefixes.
"""

import json
import random
from pathlib import Path

from bench.simulate.traces import Arrival, Trace

BLOCK_TOKENS = 512


def read(path: Path, *, speed: float = 1.0) -> Trace:
    """Return the trace of ``path``, ``speed`` times as fast as it was recorded. Tokens are made up for each block."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    arrivals = [
        Arrival(
            line["timestamp"] / 1000 / speed,
            _prompt(line["hash_ids"], line["input_length"]),
            max(1, line["output_length"]),
        )
        for line in lines
    ]
    return Trace(tuple(sorted(arrivals, key=lambda arrival: arrival.at_s)), BLOCK_TOKENS)


def _prompt(blocks: list[int], length: int) -> tuple[int, ...]:
    tokens: list[int] = []
    for block in blocks:
        tokens += random.Random(block).choices(range(2_000, 50_000), k=BLOCK_TOKENS)
    return tuple(tokens[:length])
