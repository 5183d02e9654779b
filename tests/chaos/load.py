"""Clients that stream answers all the time, and what arrived when."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from caravan_testing.oracle import repeated_list


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. ``seed``: its draws at temperature 1; None for a greedy answer."""

    prompt: str
    new_tokens: int
    seed: int | None

    @property
    def body(self) -> dict[str, Any]:
        """The body for /generate_stream."""
        parameters: dict[str, Any] = {"max_new_tokens": self.new_tokens}
        if self.seed is not None:
            parameters |= {"do_sample": True, "seed": self.seed}
        return {"inputs": self.prompt, "parameters": parameters}


def make_asks(count: int, longest: int, chance: random.Random) -> list[Ask]:
    """Return ``count`` different requests for at most ``longest`` tokens, every third of them sampled."""
    return [
        Ask(
            repeated_list(number, chance.randrange(4, 20), chance),
            chance.randrange(longest // 2, longest + 1),
            chance.randrange(1 << 32) if number % 3 == 2 else None,
        )
        for number in range(count)
    ]


@dataclass(slots=True, eq=False)
class Answer:
    """What a client has received so far. Times are those of ``time.time``."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    # When it was asked, when each event came, and when it ended.
    times: list[float] = field(default_factory=list)
    problem: str | None = None


async def read_answer(session: ClientSession, ask: Ask) -> Answer:
    """Stream the answer to ``ask``."""
    answer = Answer(ask, times=[time.time()])
    try:
        await _read(session, answer)
    except (ClientError, TimeoutError) as error:
        answer.problem = repr(error)
    answer.times.append(time.time())
    return answer


async def _read(session: ClientSession, answer: Answer) -> None:
    ended = False
    async with session.post("/generate_stream", json=answer.ask.body) as response:
        if response.status != 200:
            answer.problem = f"{response.status}: {await response.text()}"
            return
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            event = json.loads(line.removeprefix(b"data:"))
            if "error" in event:
                answer.problem = str(event)
                return
            answer.tokens.append(event["token"]["id"])
            answer.times.append(time.time())
            ended = event["generated_text"] is not None
    if not ended:
        answer.problem = "the stream has no end"


class SteadyLoad:
    """``clients`` clients, each of which asks one random request of ``asks`` after another until `stop` is set."""

    def __init__(self, url: str, asks: list[Ask], clients: int, chance: random.Random) -> None:
        self._url = url
        self._asks = asks
        self._clients = clients
        self._chance = chance
        self.stop = asyncio.Event()
        self.answers: list[Answer] = []

    async def run(self) -> None:
        """Ask until `stop` is set, and then wait for the last answers."""
        async with ClientSession(self._url, timeout=ClientTimeout(total=300)) as session, asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._client(session))

    async def _client(self, session: ClientSession) -> None:
        while not self.stop.is_set():
            answer = await read_answer(session, self._chance.choice(self._asks))
            self.answers.append(answer)
            if answer.problem is not None:
                await asyncio.sleep(0.2)


async def undisturbed(url: str, asks: list[Ask], clients: int) -> dict[Ask, list[int]]:
    """Return the tokens of the answer to each of ``asks``, of which ``clients`` run at a time."""
    turn = asyncio.Semaphore(clients)
    async with ClientSession(url, timeout=ClientTimeout(total=300)) as session:

        async def ask_one(ask: Ask) -> Answer:
            async with turn:
                return await read_answer(session, ask)

        answers = await asyncio.gather(*map(ask_one, asks))
    for answer in answers:
        assert answer.problem is None, answer
    return {answer.ask: answer.tokens for answer in answers}
