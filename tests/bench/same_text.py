"""Counts how many answers stay the same, token by token, whatever else happens. Not run by the test suite.

``PYTHONPATH=tests python -m bench.same_text``: for each build of llama.cpp, model and kind of attention, asks
one shard with ``--exact`` for ``--answers`` texts, one after another; half of them are drawn with a seed. Then it asks
two new shards for the same texts, with drafts, 16 at a time with random priorities, which preempt each other, and kills
a shard three times. Prints a row of a table for each.

``--default`` asks a shard without ``--exact`` instead, first one after another and then 8 at a time.
"""

import argparse
import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench import cpu_builds, models
from caravan_serve.bench.workloads import seeded, words
from caravan_testing.metrics_text import total
from caravan_testing.serve_process import Served, serve

_MODELS = ("random-q4_1", "random-q4_0", "random-q8_0", "random-q4_k_m")
# Of at most 8 bytes, which are tokens in the models of random weights.
_LONGEST_WORDS = 50
_FLAGS = ("--parallel", "4", "--ctx-size", "2048", "--threads", "1")
_FLEET = ("--exact", "--shards", "2", "--speculate", "4")
_IN_FLEET, _IN_COMPANY = 16, 8
_KILLS = 3
_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Row:
    """What one row of the table measures."""

    build: str
    model: str
    attention: str
    exact: bool


@dataclass(frozen=True)
class Found:
    """How often texts were equal, and how often requests lost their cells meanwhile."""

    answers: int
    same: int
    preemptions: int
    losses: int


def main() -> None:
    """Measure all rows and print each as soon as it is known."""
    parser = argparse.ArgumentParser(prog="same_text", description=__doc__)
    parser.add_argument("--builds", nargs="+", choices=cpu_builds.NAMES, default=cpu_builds.NAMES)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=_MODELS)
    parser.add_argument("--attention", nargs="+", choices=("on", "off"), default=("off", "on"))
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--default", action="store_true", help="without --exact")
    given = parser.parse_args()
    print("| build | model | flash attention | same answers | preemptions | lost shards |")
    print("|---|---|---|---:|---:|---:|")
    for build, model, attention in itertools.product(given.builds, given.models, given.attention):
        row = Row(build, model, attention, exact=not given.default)
        found = _measured(row, _bodies(given.answers, given.tokens))
        counts = f"{found.same} of {found.answers} | {found.preemptions} | {found.losses}"
        print(f"| {build} | {model} | {attention} | {counts} |", flush=True)


def _bodies(answers: int, tokens: int) -> list[dict[str, Any]]:
    """Return requests, every other one with a seeded draw instead of the likeliest token."""
    source = seeded("same text")
    return [
        {
            "prompt": words(source, source.randint(5, _LONGEST_WORDS)),
            "max_tokens": tokens,
            "temperature": number % 2,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        for number in range(answers)
    ]


def _measured(row: Row, bodies: Sequence[dict[str, Any]]) -> Found:
    model = models.model(row.model)
    # The shards inherit it.
    os.environ["LLAMA_CPP_LIB_PATH"] = str(cpu_builds.libraries(row.build))
    flags = (*_FLAGS, "--flash-attn", row.attention)
    if not row.exact:
        with serve(*flags, models=[model]) as server:
            alone = asyncio.run(_answers(server, bodies, 1))
            return _compared(alone, asyncio.run(_answers(server, bodies, _IN_COMPANY)), _metrics(server))
    with serve("--exact", *flags, models=[model]) as server:
        alone = asyncio.run(_answers(server, bodies, 1))
    random = seeded("priorities")
    ranked = [{**body, "priority": random.randint(0, 3)} for body in bodies]
    with serve(*_FLEET, *flags, models=[model]) as server:
        return _compared(alone, asyncio.run(_answers(server, ranked, _IN_FLEET, kills=_KILLS)), _metrics(server))


def _compared(alone: list[list[int]], others: list[list[int]], metrics: str) -> Found:
    same = sum(one == other for one, other in zip(alone, others, strict=True))
    preemptions = total(metrics, "caravan_preemptions")
    return Found(len(alone), same, int(preemptions), int(total(metrics, "caravan_shard_losses_total")))


def _metrics(server: Served) -> str:
    async def read() -> str:
        async with aiohttp.ClientSession(server.url) as session, session.get("/metrics") as response:
            return await response.text()

    return asyncio.run(read())


async def _answers(server: Served, bodies: Sequence[dict[str, Any]], together: int, kills: int = 0) -> list[list[int]]:
    """Return the token ids of each answer. Meanwhile ``kills`` shards are killed, after equal numbers of answers."""
    gate = asyncio.Semaphore(together)
    kill_after = {len(bodies) * (kill + 1) // (kills + 1) for kill in range(kills)}
    ended = itertools.count(1)
    timeout = aiohttp.ClientTimeout(_TIMEOUT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:

        async def answer(body: dict[str, Any]) -> list[int]:
            async with gate, session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                found: list[int] = (await response.json())["choices"][0]["token_ids"]
            if next(ended) in kill_after:
                os.kill(_a_shard(server), signal.SIGKILL)
            return found

        return list(await asyncio.gather(*map(answer, bodies)))


def _a_shard(server: Served) -> int:
    """Return the process of a shard that has not just been started."""
    return min(server.shard_pids(), key=lambda pid: Path(f"/proc/{pid}").stat().st_ctime)


if __name__ == "__main__":
    main()
