"""Counts how many greedy answers are the same in company as alone. Not run by the test suite.

``python tests/bench/company.py --url http://127.0.0.1:3000``: asks for ``--answers`` texts one after another, then for
the same ones ``--together`` at a time, and prints how many of the texts differ, and where the first difference is.
"""

import argparse
import asyncio

import aiohttp

from caravan_router.bench.words import seeded, words

_TIMEOUT_S = 3600


async def _answer(session: aiohttp.ClientSession, prompt: str, tokens: int) -> list[int]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
        found: list[int] = choice["token_ids"]
        return found


async def _answers(session: aiohttp.ClientSession, prompts: list[str], tokens: int, together: int) -> list[list[int]]:
    gate = asyncio.Semaphore(together)

    async def one(prompt: str) -> list[int]:
        async with gate:
            return await _answer(session, prompt, tokens)

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def _compare(url: str, answers: int, tokens: int, together: int) -> None:
    source = seeded("company")
    prompts = [words(source, source.randint(5, 150)) for _ in range(answers)]
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(_TIMEOUT_S)) as session:
        alone = await _answers(session, prompts, tokens, 1)
        company = await _answers(session, prompts, tokens, together)
    firsts = sorted(
        next(place for place in range(tokens) if one[place] != other[place])
        for one, other in zip(alone, company, strict=True)
        if one != other
    )
    same = answers - len(firsts)
    print(f"{same} of {answers} answers of {tokens} tokens are the same alone and {together} at a time")
    print(f"the others differ from these tokens on: {firsts}")


def main() -> None:
    """Ask, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--together", type=int, default=8)
    given = parser.parse_args()
    asyncio.run(_compare(given.url, given.answers, given.tokens, given.together))


if __name__ == "__main__":
    main()
