"""Compares the rate of scoring endings of one context with and without sharing it. Not run by the test suite.

``python tests/bench/scoring.py --url http://127.0.0.1:3000``: asks ``/v1/completions`` for the log probabilities of
``--endings`` prompts of token ids, as evaluation harnesses do. First ``--apart`` of them have a ``cache_salt`` each, so
that the context is computed for each; then all have the same. Prints both rates, and how far log probabilities differ.
"""

import argparse
import asyncio
import itertools
import random
import time
from dataclasses import dataclass

import aiohttp

_TIMEOUT_S = 3600
# Ids that most vocabularies have, and that are no control tokens.
_TOKENS = range(1_000, 20_000)
# Prompts in one request: the default of --max-client-batch-size.
_BATCH = 32


@dataclass(frozen=True, slots=True)
class Scored:
    """Seconds until all replies were there, and the log probabilities of each ending's tokens."""

    seconds: float
    logprobs: list[list[float]]


async def _score(session: aiohttp.ClientSession, prompts: list[list[int]], ending: int, salts: list[str]) -> Scored:
    """Score ``prompts``, whose last ``ending`` tokens count. Those with equal ``salts`` share requests."""

    async def ask(group: list[list[int]], salt: str) -> list[list[float]]:
        body = {"prompt": group, "max_tokens": 0, "echo": True, "logprobs": 1, "cache_salt": salt}
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            choices = (await response.json())["choices"]
            return [choice["logprobs"]["token_logprobs"][-ending:] for choice in choices]

    started = time.perf_counter()
    groups = [
        ([prompt for prompt, _ in pairs[start : start + _BATCH]], salt)
        for salt, found in itertools.groupby(zip(prompts, salts, strict=True), key=lambda pair: pair[1])
        for pairs in (list(found),)
        for start in range(0, len(pairs), _BATCH)
    ]
    replies = await asyncio.gather(*(ask(*group) for group in groups))
    return Scored(time.perf_counter() - started, [row for reply in replies for row in reply])


async def _compare(given: argparse.Namespace) -> None:
    endings, apart, context, ending = given.endings, given.apart, given.context, given.ending
    async with aiohttp.ClientSession(given.url, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)) as session:
        for number in range(given.rounds):
            source = random.Random(number)
            shared = source.choices(_TOKENS, k=context)
            prompts = [[*shared, *source.choices(_TOKENS, k=ending)] for _ in range(endings)]
            alone = await _score(session, prompts[:apart], ending, [f"{number} {place}" for place in range(apart)])
            together = await _score(session, prompts, ending, [f"{number} together"] * endings)
            pairs = zip(itertools.chain(*alone.logprobs), itertools.chain(*together.logprobs[:apart]), strict=True)
            difference = max(abs(one - other) for one, other in pairs)
            alone_rate, rate = apart / alone.seconds, endings / together.seconds
            print(
                f"{endings} endings of {ending} tokens behind {context}: {alone_rate:.2f} a second apart, "
                f"{rate:.1f} together, {rate / alone_rate:.1f} times as many; "
                f"log probabilities differ by at most {difference:.4f}"
            )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--endings", type=int, default=64)
    parser.add_argument("--apart", type=int, default=64, help="endings whose context is computed for each")
    parser.add_argument("--context", type=int, default=1000, help="tokens of the context")
    parser.add_argument("--ending", type=int, default=8, help="tokens of each ending")
    parser.add_argument("--rounds", type=int, default=1)
    asyncio.run(_compare(parser.parse_args()))


if __name__ == "__main__":
    main()
