"""Measures how much constrained sequences slow down the others of their batch. Not run by the test suite.

``python tests/bench/constrained_cost.py --model FILE``: eight streams decode together, and in every other round half of
them must match a JSON schema. Prints the speed of the other half, which is never constrained.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.paths import DEMO_MODEL
from caravan_testing.serve_process import serve

FREE, OTHERS = 4, 4
TOKENS = 160
# More items than fit, so that the output never ends before its last token.
SCHEMA = {
    "type": "array",
    "minItems": 60,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


async def _stream(session: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> float:
    """Return the seconds from the first token to the last."""
    prompt = f"People and their ages, list {number}, as JSON:"
    fields = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True} | body
    first = last = 0.0
    async with session.post("/v1/completions", json=fields) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
    return last - first


async def _round(session: aiohttp.ClientSession, *, constrained: bool) -> float:
    """Return the median speed of the unconstrained streams, in tokens per second."""
    format_ = {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": SCHEMA}}}
    other = format_ if constrained else {"ignore_eos": True}
    seconds = await asyncio.gather(
        *(_stream(session, number, {"ignore_eos": True}) for number in range(FREE)),
        *(_stream(session, FREE + number, other) for number in range(OTHERS)),
    )
    return (TOKENS - 1) / median(seconds[:FREE])


async def measure(url: str, rounds: int) -> None:
    """Measure with and without constraints in turn, so that a machine that slows down affects both equally."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    async with aiohttp.ClientSession(url) as session:
        await _round(session, constrained=True)  # The first round compiles the schema.
        for number in range(2 * rounds):
            constrained = number % 2 == 1
            speeds[constrained].append(await _round(session, constrained=constrained))
            print(
                f"  {'beside constrained ones' if constrained else 'all free'}: {speeds[constrained][-1]:.2f} tokens/s"
            )
    free, beside = median(speeds[False]), median(speeds[True])
    print(
        f"a free stream: {free:.2f} tokens/s among free ones, {beside:.2f} beside constrained ones: {beside / free:.3f}"
    )


def main() -> None:
    """Serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    flags = ("-np", str(FREE + OTHERS), "-c", "8192", "-t", "2", "--prefix-caching", "false")
    with serve("--model", str(arguments.model.resolve()), *flags) as served:
        asyncio.run(measure(served.url, arguments.rounds))


if __name__ == "__main__":
    main()
