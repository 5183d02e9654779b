"""Random clients: shared and different prompts, several choices, priorities, sampling, streams, and disconnects."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from caravan_testing.oracle import WORDS

_LEAVING_SHARE = 1 / 3
_LONGEST_STAY_S = 4.0
_BURST = 14


@dataclass
class Tally:
    """Counts of requests that were answered and of clients that left early, and the texts of all errors."""

    answered: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.answered + self.left + len(self.errors)


class RandomLoad:
    """Runs ``clients`` clients, each of which sends one request after another until ``stop`` is set.

    Every ``burst_every_s`` seconds, but not before the previous burst has ended, a burst adds requests with long
    prompts and ``burst_tokens`` output tokens. The requests of a burst do not fit the KV cache together.
    """

    def __init__(self, url: str, *, clients: int, burst_every_s: float, burst_tokens: int, seed: int) -> None:
        self._url = url
        self._clients = clients
        self._burst_every_s = burst_every_s
        self._burst_tokens = burst_tokens
        self._chance = random.Random(seed)
        self._openings = [self._words(self._chance.randrange(20, 80)) for _ in range(6)]
        self.stop = asyncio.Event()
        self.tally = Tally()

    async def run(self) -> None:
        """Send requests until ``stop`` is set, and then wait for the running ones."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._clients):
                tasks.create_task(self._client())
            while not await self._stops_within(self._burst_every_s / 2):
                burst = [tasks.create_task(self._send(self._long_body())) for _ in range(_BURST)]
                if await self._stops_within(self._burst_every_s / 2):
                    break
                await asyncio.wait(burst)

    async def _stops_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self.stop.wait()
        except TimeoutError:
            return False

    async def _client(self) -> None:
        while not self.stop.is_set():
            await self._send(self._body())

    async def _send(self, body: dict[str, Any]) -> None:
        # Each request has its own connection, which it closes at its end.
        async with ClientSession(timeout=ClientTimeout(total=600)) as session:
            try:
                await self._exchange(session, body)
            except Exception as error:
                self.tally.errors.append(repr(error))

    async def _exchange(self, session: ClientSession, body: dict[str, Any]) -> None:
        chance = self._chance
        stays_s = chance.random() * _LONGEST_STAY_S if chance.random() < _LEAVING_SHARE else None
        try:
            async with asyncio.timeout(stays_s), session.post(f"{self._url}/v1/completions", json=body) as response:
                text = await response.text()
        except TimeoutError:
            if stays_s is None:
                raise
            self.tally.left += 1
            return
        problem = _problem(body, response.status, text)
        if problem is None:
            self.tally.answered += 1
        else:
            self.tally.errors.append(problem)

    def _body(self) -> dict[str, Any]:
        chance = self._chance
        opening = chance.choice(self._openings) if chance.random() < 0.5 else self._words(chance.choice((5, 20, 50)))
        body: dict[str, Any] = {
            "prompt": f"{opening} {self._words(chance.randrange(1, 8))}",
            "max_tokens": chance.choice((4, 8, 16, 32, 64)),
            "temperature": chance.choice((0.0, 0.8, 1.5)),
            "seed": chance.randrange(1 << 32),
            "priority": chance.choice((0, 0, 0, 1, 2)),
            "stream": chance.random() < 0.5,
            "n": chance.choice((1, 1, 1, 2, 3)),
        }
        if chance.random() < 0.1:
            body["cache_salt"] = chance.choice("ab")
        if chance.random() < 0.2:
            body |= {"top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "logprobs": 2}
        return body

    def _long_body(self) -> dict[str, Any]:
        """Return a request of a burst."""
        prompt = self._words(self._chance.randrange(100, 250))
        return self._body() | {"prompt": prompt, "max_tokens": self._burst_tokens, "n": 1}

    def _words(self, count: int) -> str:
        return " ".join(self._chance.choices(WORDS, k=count))


def _problem(body: dict[str, Any], status: int, text: str) -> str | None:
    """Return what is wrong with a reply, or None."""
    if status != 200:
        return f"{status}: {text}"
    if body["stream"]:
        events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
        if events[-1] != "[DONE]":
            return f"a stream without its end: {events[-1]}"
        chunks = [json.loads(event) for event in events[:-1]]
    else:
        chunks = [json.loads(text)]
    ends = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    return None if sorted(ends) == list(range(body["n"])) else f"choices {ends} of {body['n']} ended"
