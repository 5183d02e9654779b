"""Measures what a model's own head is worth over HTTP: `PYTHONPATH=tests python -m bench.head_gain`, in five minutes.

Writes models of 24 layers, once, whose heads are right nine times and once in ten by construction. Caravan and
llama-server serve each with its head and without, all four at the same time. Rounds alternate, so that what else the
machine does disturbs all alike. Prints the ratios of the medians. All texts are the same ones.

`--kind mtp`: 40 MB in Q4_0, which fit into the caches of some processors. `mtp-large`: 400 MB. The others, whose heads
are files: 64 dimensions and wide layers, 150 MB in F32, so that reading the weights takes most of a step.
"""

import argparse
import asyncio
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from bench.contenders import Common, Contender, Product
from bench.paths import CACHE, DEMO_MODEL, describe
from bench.servers import Running, serving
from caravan_testing.metrics_text import total
from caravan_testing.shard_tiny_glm import GlmShape, write_chain_glm
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.tiny_dflash import Dflash, write_cyclic
from caravan_testing.tiny_eagle3 import Eagle3
from caravan_testing.tiny_heads import Heads

_SHAPE = GlmShape(
    embedding=512, layers=24, dense=24, heads=8, kv_heads=4, feed_forward=1536, expert=512, is_quantised=True
)
_LARGE_SHAPE = GlmShape(
    embedding=1536, layers=24, dense=24, heads=12, kv_heads=4, feed_forward=4608, expert=1536, is_quantised=True
)
# So wide that 64 dimensions have enough weights.
_WIDE = Shape(layers=24, inner=8192, context=8192, trunk=0.0003)
_VOCABULARY = 49_152
_WORDS = 7933
_FIRST_WORD = 259
_PROMPT = 24
# Tokens of each stream by the number of streams.
_TOKENS = {1: 160, 2: 160, 4: 128, 8: 96, 32: 96}
_SLOTS, _CELLS = 32, 8192
_MOST = 4
_BLOCK = 8


class Files(NamedTuple):
    """A model, and the file of its head if that is another one."""

    model: Path
    head: Path | None = None


@dataclass
class Got:
    """Of one server: the rates by number of streams, and how many draft tokens there were and were right."""

    rates: dict[int, list[float]]
    drafted: int = 0
    accepted: int = 0


def lineup(kind: str, head_file: Path | None) -> tuple[Contender, ...]:
    """Return each server without and with the head."""
    common: dict[str, Any] = {"slots": _SLOTS, "cells": _CELLS}
    ours: dict[str, Any] = {"product": Product.CARAVAN, **common}
    peer: dict[str, Any] = {"product": Product.LLAMA_SERVER, **common}
    file = () if head_file is None else ("--model-draft", str(head_file))
    head = ("--spec-type", f"draft-{kind.removesuffix('-large')}", *file)
    most, most_of_peer = (_BLOCK, _BLOCK - 1) if kind == "dflash" else (_MOST, _MOST - 1)
    return (
        Contender(name="plain", **ours),
        Contender(name="head", flags=(*head, "--speculate", str(most)), **ours),
        Contender(name="plain", flags=("-kvu",), **peer),
        Contender(name="head", flags=("-kvu", *head, "--spec-draft-n-max", str(most_of_peer)), **peer),
    )


def _mtp(right: float) -> Files:
    return _chain("chain-glm4moe", _SHAPE, right)


def _large_mtp(right: float) -> Files:
    return _chain("large-chain-glm4moe", _LARGE_SHAPE, right)


def _chain(name: str, shape: GlmShape, right: float) -> Files:
    heads = Heads(trunk=0.0002, right=right)
    return Files(_written(f"{name}-{right}", lambda path: write_chain_glm(path, _WORDS, heads, shape)))


def _eagle3(right: float) -> Files:
    model = _written("wide-llama", lambda path: write_tiny_llama(path, _WIDE, DEMO_MODEL))
    head = Eagle3(vocabulary=_known(right))
    return Files(model, _written(f"wide-eagle3-{right}", lambda path: head.write(path, DEMO_MODEL)))


def _dflash(right: float) -> Files:
    model = _written("wide-cyclic", lambda path: write_cyclic(path, _eagle3(right).model))
    head = Dflash(block=_BLOCK, vocabulary=_known(right))
    return Files(model, _written(f"wide-dflash-{right}", lambda path: head.write(path, DEMO_MODEL)))


_KINDS = {"mtp": _mtp, "mtp-large": _large_mtp, "eagle3": _eagle3, "dflash": _dflash}


def _known(right: float) -> Sequence[int]:
    """Return the tokens that a head knows which is right so often."""
    return sorted(random.Random(53).sample(range(_VOCABULARY), round(right * _VOCABULARY)))


def _written(name: str, write: Callable[[Path], Path]) -> Path:
    path = CACHE / "models" / f"{name}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path.with_suffix(".unfinished")).replace(path)
    return path


async def _ask(session: ClientSession, url: str, contender: Contender, prompt: Sequence[int], tokens: int) -> Any:
    """Return the text of an answer, and how many draft tokens it had and took, if the server says so."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if contender.product is Product.CARAVAN:
        # Nothing is copied from other answers.
        body["cache_salt"] = str(random.random())
    async with session.post(f"{url}/v1/completions", json=body) as response:
        found = await response.json()
        assert response.status == 200, found
        timings = found.get("timings") or {}
        return found["choices"][0]["text"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)


async def _streams(running: Running, contender: Contender, count: int, seed: int, got: Got | None) -> list[str]:
    """Let ``count`` streams run at once; note their rate. Return their texts."""
    chance, tokens = random.Random(f"{count} {seed}"), _TOKENS.get(count, 96)
    prompts = [[chance.randrange(_FIRST_WORD, _FIRST_WORD + _WORDS) for _ in range(_PROMPT)] for _ in range(count)]
    async with ClientSession(timeout=ClientTimeout(600), connector=TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        answers = await asyncio.gather(*(_ask(session, running.url, contender, one, tokens) for one in prompts))
        seconds = time.perf_counter() - began
    if got is not None:
        got.rates[count].append(count * tokens / seconds)
        got.drafted += sum(drafted for _, drafted, _ in answers)
        got.accepted += sum(accepted for _, _, accepted in answers)
    return [text for text, _, _ in answers]


async def _of_ours(running: Running) -> tuple[int, int]:
    async with ClientSession(running.url) as session:
        metrics = await (await session.get("/metrics")).text()
    names = ("caravan_spec_decode_num_draft_tokens_total", "caravan_spec_decode_num_accepted_tokens_total")
    drafted, accepted = (int(total(metrics, name, 'source="model"')) for name in names)
    return drafted, accepted


async def _compare(running: Sequence[tuple[Contender, Running]], given: argparse.Namespace) -> dict[int, Got]:
    found = {number: Got(defaultdict(list)) for number in range(len(running))}
    for count in given.streams:
        # The first round is not counted: servers learn what steps cost.
        for seed in range(given.rounds + 1):
            order = list(enumerate(running))
            texts = {}
            for number, (contender, server) in order if seed % 2 else order[::-1]:
                texts[number] = await _streams(server, contender, count, seed, found[number] if seed else None)
            if any(one != texts[0] for one in texts.values()):
                print(f"  the texts of {count} streams differ")
    for number, (contender, server) in enumerate(running):
        if contender.product is Product.CARAVAN:
            found[number].drafted, found[number].accepted = await _of_ours(server)
    return found


def _print(kind: str, right: float, found: dict[int, Got], streams: Sequence[int]) -> None:
    for plain, head, name in ((0, 1, "Caravan"), (2, 3, "llama-server")):
        if plain not in found:
            continue
        print(f"{name}, {kind} right {right}: {found[head].accepted} of {found[head].drafted} draft tokens right")
        for count in streams:
            rates = [median(found[number].rates[count]) for number in (plain, head)]
            print(f"  {count:2} streams: {rates[0]:7.1f} -> {rates[1]:7.1f} tokens/s, {rates[1] / rates[0]:.2f} times")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=_KINDS, default="mtp")
    parser.add_argument("--streams", type=int, nargs="*", default=list(_TOKENS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--right", type=float, nargs="*", default=[0.9, 0.1])
    parser.add_argument("--only-caravan", action="store_true")
    parser.add_argument("-t", type=int, default=1)
    given = parser.parse_args()
    # The default action would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{describe()}, {given.t} thread")
    for right in given.right:
        files = _KINDS[given.kind](right)
        common = Common(model=files.model, threads=given.t)
        contenders = lineup(given.kind, files.head)[: 2 if given.only_caravan else None]
        with ExitStack() as started:
            running = [(one, started.enter_context(serving(one, common))) for one in contenders]
            _print(given.kind, right, asyncio.run(_compare(running, given)), given.streams)


if __name__ == "__main__":
    main()
