"""Has random conversations with a real server, and counts the answers that equal those computed from the start.

Between the answers the server restarts, shards drain and are killed, and urgent requests preempt others.
"""

import asyncio
import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import ClientSession, ClientTimeout

from caravan_testing.metrics_text import total
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import eventually

Message = list[int]
Messages = list[Message]

_MOST_KEPT = 6
_SYSTEM_TOKENS, _QUESTION_TOKENS = (60, 120), (20, 90)


def tokens_of(messages: Sequence[Message]) -> list[int]:
    """Return the prompt that has these messages."""
    return list(chain.from_iterable(messages))


@dataclass
class Histories:
    """``words``: the tokens of messages. ``end``: the token that ends each of them. ``longest``: tokens of a prompt."""

    chance: Random
    words: range
    end: int
    longest: int
    kept: list[Messages] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._systems = [self._message(_SYSTEM_TOKENS) for _ in range(2)]

    def keep(self, prompt: Messages, answer: Sequence[int]) -> None:
        """Remember a conversation with its last answer, and forget one of many."""
        self.kept.append([*prompt, [*answer, self.end]])
        if len(self.kept) > _MOST_KEPT:
            del self.kept[self.chance.randrange(len(self.kept))]

    def new(self) -> Messages:
        """Return the prompt of a new conversation, as all following methods return prompts."""
        return [self.chance.choice(self._systems), self._question()]

    def next_turn(self) -> Messages:
        return [*self._some(), self._question()]

    def rewound(self) -> Messages:
        """Return one that goes back by some turns."""
        messages = self._some()
        return self._fitting([*messages[: 1 + 2 * self.chance.randrange(len(messages) // 2)], self._question()])

    def edited(self) -> Messages:
        """Return one with another message in place of one that is not the first."""
        messages = list(self._some())
        messages[self.chance.randrange(1, len(messages))] = self._question()
        return self._fitting([*messages, self._question()])

    def shifted(self) -> Messages:
        """Return one whose first turn after the system's message is left out."""
        messages = self._some()
        return [messages[0], *messages[3:], self._question()]

    def forks(self, count: int) -> list[Messages]:
        """Return so many that go on from the same place."""
        messages = self._some()
        return [[*messages, self._question()] for _ in range(count)]

    def any_of(self, count: int) -> list[Messages]:
        """Return so many of any kind."""
        kinds: list[Callable[[], Messages]] = [self.new, self.next_turn, self.next_turn, self.rewound, self.edited]
        return [self.chance.choice(kinds)() for _ in range(count)]

    def _some(self) -> Messages:
        """Return a conversation that has room for another turn."""
        fitting = [one for one in self.kept if len(tokens_of(one)) + _QUESTION_TOKENS[1] < self.longest]
        return self.chance.choice(fitting) if fitting else [*self.new()[:1], self._question(), self._question()]

    def _fitting(self, prompt: Messages) -> Messages:
        """Return ``prompt``, or one of a new conversation if it is too long."""
        return prompt if len(tokens_of(prompt)) <= self.longest else self.new()

    def _question(self) -> Message:
        return self._message(_QUESTION_TOKENS)

    def _message(self, bounds: tuple[int, int]) -> Message:
        return [*self.chance.choices(self.words, k=self.chance.randint(*bounds)), self.end]


# Of the tokenizers of all test models: words, and the token that ends a message.
WORDS, END = range(20, 250), 2
_CELLS, _SEQUENCES, _SHARDS = 1024, 2, 2
_ANSWER_TOKENS, _LONG_ANSWER_TOKENS = 16, 160
_FLAGS = ("--exact", "-t", "1", "-np", str(_SEQUENCES), "-c", str(_CELLS * _SEQUENCES))
# More than all shards have sequences at a time.
_CROWD, _URGENT = 2 * _SEQUENCES * _SHARDS, 2
_WITHIN_S = 600.0


@dataclass
class Counts:
    """Answers by what happened before, those that were equal, and what the server says of all of them."""

    answers: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    metrics: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int


class Asker:
    """Asks one server."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def ask(
        self, messages: Messages, new_tokens: int, started: asyncio.Event | None = None, **fields: Any
    ) -> Answer:
        """Return a greedy answer. ``started``: set when its first token is there."""
        body = {"prompt": tokens_of(messages), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}} | fields
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        async with self._session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
                usage = event.get("usage") or usage
                if started is not None:
                    started.set()
        assert len(tokens) == new_tokens
        return Answer(tokens, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])

    async def metrics(self) -> str:
        return await (await self._session.get("/metrics")).text()

    async def until_all_serve(self) -> None:
        await eventually(self._states, "all shards serve", lambda states: states.count("serving") == _SHARDS)

    async def drain_the_fullest(self) -> None:
        """Let the shard that holds most go; what it holds moves to another."""
        held = (await (await self._session.get("/admin/prefixes")).json())["shards"]
        fullest = max(held, key=lambda one: int(one["cells"]) + int(one["memory_bytes"]))["shard"]
        before = await self._lives()
        async with self._session.post(f"/admin/shards/{fullest.replace('/', '%2F')}/drain") as response:
            assert response.status == 200, await response.text()
        await eventually(self._lives, "a shard leaves", lambda lives: lives != before)

    async def _states(self) -> list[str]:
        return [state for state, _ in await self._lives()]

    async def _lives(self) -> list[tuple[str, int]]:
        """Return the state and the epoch of each shard. A shard that has come back has another epoch."""
        listed = (await (await self._session.get("/admin/shards")).json())["shards"]
        return [(one["state"], one["epoch"]) for one in listed]


@contextlib.asynccontextmanager
async def asking(server: Served) -> AsyncIterator[Asker]:
    async with ClientSession(server.url, timeout=ClientTimeout(_WITHIN_S)) as session:
        yield Asker(session)


class HistoryRun:
    """Random conversations with the servers of one model.

    ``one``: the server that all is done to. ``plain``: one that computes each prompt from the start, alone.
    """

    def __init__(self, one: Served, plain: Asker, asker: Asker, histories: Histories, counts: Counts) -> None:
        self._one, self._plain, self._asker = one, plain, asker
        self._histories, self._counts = histories, counts

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What can happen, by name, but for a restart."""
        return {
            "fork": lambda: self._answer("fork", self._histories.forks(3)),
            "rewind": lambda: self._answer("rewind", [self._histories.rewound()]),
            "edit": lambda: self._answer("edit", [self._histories.edited(), self._histories.shifted()]),
            "move": self._move,
            "preemption": self._preempt,
            "lost shard": self._lose_a_shard,
        }

    async def begin(self) -> None:
        """Have turns that nothing disturbs, so that there is something to go on with."""
        await self._answer("next turn", [self._histories.new(), self._histories.new()])
        await self.go_on("next turn", 2)

    async def go_on(self, kind: str, count: int) -> None:
        await self._answer(kind, [self._histories.next_turn() for _ in range(count)])

    async def _move(self) -> None:
        await self._asker.until_all_serve()
        await self._asker.drain_the_fullest()
        await self.go_on("move", 3)
        await self._asker.until_all_serve()

    async def _preempt(self) -> None:
        """Let urgent requests come while more run and wait than fit."""
        await self._crowd("preemption", self._urgent)

    async def _urgent(self) -> None:
        await self._answer("preemption", [self._histories.next_turn() for _ in range(_URGENT)], priority=2)

    async def _lose_a_shard(self) -> None:
        """Kill a shard while all have work."""
        await self._asker.until_all_serve()

        async def kill() -> None:
            os.kill(self._histories.chance.choice(self._one.shard_pids()), signal.SIGKILL)

        await self._crowd("lost shard", kill)
        await self._asker.until_all_serve()

    async def _crowd(self, kind: str, meanwhile: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Ask for many long answers, and do something when as many of them have begun as run at a time."""
        prompts = self._histories.any_of(_CROWD)
        started = [asyncio.Event() for _ in prompts]

        async def interrupt() -> None:
            begun = asyncio.as_completed([one.wait() for one in started])
            for _ in range(_SEQUENCES * _SHARDS):
                await next(begun)
            await meanwhile()

        interrupting = asyncio.create_task(interrupt())
        asked = [
            self._asker.ask(prompt, _LONG_ANSWER_TOKENS, one) for prompt, one in zip(prompts, started, strict=True)
        ]
        answers = await asyncio.gather(*asked)
        await interrupting
        await self._check(kind, prompts, answers)

    async def _answer(self, kind: str, prompts: Sequence[Messages], **fields: Any) -> None:
        answers = await asyncio.gather(*(self._asker.ask(one, _ANSWER_TOKENS, **fields) for one in prompts))
        await self._check(kind, prompts, answers)

    async def _check(self, kind: str, prompts: Sequence[Messages], answers: Sequence[Answer]) -> None:
        counts = self._counts
        for prompt, answer in zip(prompts, answers, strict=True):
            salt = f"{sum(counts.answers.values())}"
            expected = await self._plain.ask(prompt, len(answer.tokens), cache_salt=salt)
            assert expected.cached_tokens == 0
            counts.answers[kind] += 1
            counts.same[kind] += answer.tokens == expected.tokens
            counts.prompt_tokens += answer.prompt_tokens
            counts.cached_tokens += answer.cached_tokens
            self._histories.keep(prompt, answer.tokens[:_ANSWER_TOKENS])


@contextlib.contextmanager
def _servers(model: Path, folder: Path, flags: Sequence[str]) -> Iterator[Served]:
    with serve("--shards", str(_SHARDS), "--cache-dir", str(folder), *_FLAGS, *flags, models=[model]) as server:
        yield server


def had(model: Path, folder: Path, *, answers: int, seed: int = 0, flags: Sequence[str] = ()) -> Counts:
    """Have conversations until there are ``answers``. ``folder``: for what is saved. ``flags``: more of the server."""
    chance, counts = Random(seed), Counts()
    histories = Histories(chance, WORDS, END, longest=_CELLS - _LONG_ANSWER_TOKENS)

    async def one_life(server: Served, plain_server: Served, kinds: Sequence[str], first: str) -> None:
        async with asking(server) as asker, asking(plain_server) as plain:
            await asker.until_all_serve()
            run = HistoryRun(server, plain, asker, histories, counts)
            await (run.begin() if not histories.kept else run.go_on(first, 3))
            for kind in kinds:
                if sum(counts.answers.values()) < answers:
                    await run.kinds[kind]()
            page = await asker.metrics()
            for name in ("caravan_request_preemptions_total", "caravan_shard_losses_total"):
                counts.metrics[name] += int(total(page, name))

    names = ["fork", "rewind", "rewind", "edit", "move", "preemption", "lost shard"]
    with serve(*_FLAGS, models=[model]) as plain_server:
        while sum(counts.answers.values()) < answers:
            chance.shuffle(names)
            with _servers(model, folder, flags) as server:
                asyncio.run(one_life(server, plain_server, names, "restart"))
    return counts
