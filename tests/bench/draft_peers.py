"""Compares drafts from the context with llama-server's n-grams: `PYTHONPATH=tests python -m bench.draft_peers`.

Each stream continues a text that its prompt has, over HTTP. All servers are resident and are loaded in turn, so a
machine that slows down affects all of them.
"""

import argparse
import asyncio
import pydoc_data.topics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import aiohttp

from bench.contenders import Common, Contender, Product
from bench.models import model
from bench.servers import serving

_TIMEOUT_S = 600
# So many letters of a text are given again, and the model continues with the rest.
_LETTERS, _AGAIN = 1200, 150
_SIMPLE = ("--spec-type", "ngram-simple")
_MOD = ("--spec-type", "ngram-mod")
# llama-server's defaults look for 12 or 24 tokens and draft 48 or 64, which no processor computes as fast as one.
_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "ngram-simple": _SIMPLE,
    "ngram-simple-5-3": (*_SIMPLE, "--spec-ngram-simple-size-n", "5", "--spec-ngram-simple-size-m", "3"),
    "ngram-simple-5-7": (*_SIMPLE, "--spec-ngram-simple-size-n", "5", "--spec-ngram-simple-size-m", "7"),
    "ngram-mod": _MOD,
    "ngram-mod-8-4": (
        *(*_MOD, "--spec-ngram-mod-n-match", "8"),
        *("--spec-ngram-mod-n-min", "1", "--spec-ngram-mod-n-max", "4"),
    ),
}


def _prompts(streams: int, number: int) -> list[str]:
    """Return prompts that no other round has, so that no server has a prefix of them."""
    texts = [str(text) for text in pydoc_data.topics.topics.values() if len(str(text)) > 3 * _LETTERS]
    start = number * streams
    chosen = [texts[place % len(texts)][(place // len(texts)) * 97 :] for place in range(start, start + streams)]
    return [f"The text:\n\n{text[:_LETTERS]}\n\nThe text again:\n\n{text[:_AGAIN]}" for text in chosen]


async def _stream(session: aiohttp.ClientSession, prompt: str, tokens: int) -> tuple[float, float]:
    """Return the times of the first and of the last token."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    first = last = 0.0
    async with session.post("/v1/completions", json=body | {"ignore_eos": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = time.perf_counter()
                first = first or last
    return first, last


async def _rate(url: str, prompts: Sequence[str], tokens: int) -> float:
    """Return the tokens per second of all streams together. Their prompts are in the cache."""
    # llama-server closes connections that another request is about to use.
    connector, timeout = aiohttp.TCPConnector(force_close=True), aiohttp.ClientTimeout(_TIMEOUT_S)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        for prompt in prompts:
            await _stream(session, prompt, 1)
        times = await asyncio.gather(*(_stream(session, prompt, tokens) for prompt in prompts))
    return len(prompts) * tokens / (max(last for _, last in times) - min(first for first, _ in times))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-q4_1")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--peers", nargs="*", choices=tuple(_FLAGS), default=tuple(_FLAGS))
    given = parser.parse_args()
    common = Common(model=model(given.model), threads=2)
    settings: dict[str, Any] = {"slots": 8, "cells": 8192}
    drafts = ("--speculate", str(given.speculate))
    servers = [
        Contender(name="drafts", product=Product.CARAVAN, flags=drafts, **settings),
        Contender(name="none", product=Product.CARAVAN, **settings),
        *(Contender(name=name, product=Product.LLAMA_SERVER, flags=_FLAGS[name], **settings) for name in given.peers),
    ]
    with ExitStack() as stack:
        urls = {server.name: stack.enter_context(serving(server, common)).url for server in servers}
        for streams in given.streams:
            rates: dict[str, list[float]] = {name: [] for name in urls}
            for number in range(given.rounds):
                for name in list(urls) if number % 2 == 0 else reversed(urls):
                    prompts = _prompts(streams, 100 * streams + number)
                    rates[name].append(asyncio.run(_rate(urls[name], prompts, given.tokens)))
            for name, found in rates.items():
                ratio = median(one / other for one, other in zip(rates["drafts"], found, strict=True))
                print(
                    f"{streams} streams, {name:16}: {median(found):6.1f} tokens/s ({min(found):.1f} to "
                    f"{max(found):.1f}); Caravan with drafts {ratio:.2f} times",
                    flush=True,
                )


if __name__ == "__main__":
    main()
