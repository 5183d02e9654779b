"""Conversations with models that have recurrent layers: a turn computes what is new, and the text stays the same.

`test_same_after_anything.py` has random conversations with restarts, drains and preemption. Whether a state is loaded
or a prompt computed from an earlier one depends on what both have cost on this host, so here it counts that some is not
computed; `tests/unit/scheduler/test_checkpoints.py` has the exact places, with given costs.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_testing.serve_process import serve
from caravan_testing.shard_models import HYBRID_MODEL, RECURRENT_MODEL, fetched

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TURNS, NEW_TOKENS = 10, 24
WORDS = ("river", "stone", "cloud", "market", "winter", "letter", "garden", "engine", "paper", "island", "morning")
SYSTEM = {"role": "system", "content": " ".join(WORDS * 25)}
Messages = list[dict[str, str]]


def question(number: int) -> dict[str, str]:
    chance = random.Random(number)
    return {"role": "user", "content": " ".join(chance.choices(WORDS, k=200))}


def answer(number: int) -> dict[str, str]:
    """What a client keeps of an answer: not the thoughts, which the model has computed."""
    chance = random.Random(1000 + number)
    return {"role": "assistant", "content": " ".join(chance.choices(WORDS, k=160))}


def turns(count: int, first: int = 0) -> Messages:
    """Return the messages of a conversation whose last question is that of turn ``count``."""
    messages = [SYSTEM]
    for number in range(first, first + count):
        messages += [question(number), answer(number)]
    return messages[:-1]


class Answers:
    """Asks a server, and counts what it computes."""

    def __init__(self, session: ClientSession, *, exact: bool = True) -> None:
        """``exact``: whether a text depends on the prompt alone. Otherwise rounding may decide between near ties."""
        self._session = session
        self.exact = exact
        self.prompt_tokens = self.computed = 0

    async def ask(self, messages: Messages, **fields: Any) -> list[str]:
        body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True} | fields
        async with self._session.post("/v1/chat/completions", json=body) as response:
            got = await response.json()
            assert response.status == 200, got
        usage = got["usage"]
        self.prompt_tokens = usage["prompt_tokens"]
        self.computed = self.prompt_tokens - usage["prompt_tokens_details"]["cached_tokens"]
        return [choice["message"]["content"] for choice in got["choices"]]

    async def check(self, messages: Messages) -> int:
        """Ask, and check that the text is the one that is computed from the start. Return how much was computed."""
        texts = await self.ask(messages)
        computed = self.computed
        from_start = await self.ask(messages, cache_salt=f"from the start {random.random()}")
        assert self.computed == self.prompt_tokens
        assert not self.exact or texts == from_start
        return computed


async def converse(answers: Answers) -> None:
    assert await answers.check(turns(1)) == answers.prompt_tokens
    first = answers.prompt_tokens
    computed = in_all = 0
    for count in range(2, TURNS + 1):
        computed += await answers.check(turns(count))
        in_all += answers.prompt_tokens
    assert answers.prompt_tokens > 3000
    # The template has no place for the thoughts of earlier turns, so what the model computed of them is of no use.
    assert answers.prompt_tokens - first < computed < in_all


async def change(answers: Answers) -> None:
    """Go back in a conversation that was had, and go on in other ways."""
    other = [*turns(TURNS)[:-1], question(77)]
    # Back by one turn, and by some; another question in place of the last one; another conversation that begins alike.
    computed = in_all = 0
    for messages in (turns(TURNS - 1), turns(TURNS // 2), other, [SYSTEM, question(78)]):
        computed += await answers.check(messages)
        in_all += answers.prompt_tokens
    assert computed < in_all
    # Several answers.
    texts = await answers.ask(other, n=3)
    again = await answers.ask(other)
    assert not answers.exact or texts == again * 3


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        (HYBRID_MODEL, ("--exact",)),
        pytest.param(RECURRENT_MODEL, ("--exact",), marks=pytest.mark.slow),
        pytest.param(HYBRID_MODEL, ("--kv-layout", "unified"), marks=pytest.mark.slow),
        pytest.param(RECURRENT_MODEL, ("--kv-layout", "split"), marks=pytest.mark.slow),
    ],
)
def test_a_turn_computes_what_is_new(model: Path, flags: tuple[str, ...]) -> None:
    async def run(url: str) -> None:
        async with ClientSession(url) as session:
            answers = Answers(session, exact="--exact" in flags)
            await converse(answers)
            await change(answers)

    with serve("-np", "4", "-c", "16384", "-t", "1", *flags, models=(fetched(model),)) as served:
        asyncio.run(run(served.url))
