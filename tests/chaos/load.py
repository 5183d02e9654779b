"""The load during chaos, and what is wrong with the answers, seen from outside."""

import asyncio
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from caravan_testing.metrics_text import total
from caravan_testing.oracle import Oracle, draw_gap, greedy_gap, repeated_list
from chaos.faults import LOSING, Fault, Kind


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


# Where a text went another way, the gap was 0.26 at most; a lost or repeated token leaves one of several logits.
TIE_LOGITS = 0.5
# The silence after which a shard is given up, and the time between two reports.
NOTICE_S = 2.0


@dataclass(frozen=True, slots=True)
class Noticed:
    """A fault, and after how many seconds the router gave the shard up; None if it did not."""

    fault: Fault
    after_s: float | None


def match_losses(faults: Iterable[Fault], losses: Sequence[tuple[float, str]]) -> list[Noticed]:
    """Find for each fault the first loss of its shard in its time. ``losses``: times and addresses."""
    found = []
    for fault in faults:
        if fault.spot is None:
            found.append(Noticed(fault, None))
            continue
        address = fault.spot.address
        # The log has milliseconds.
        ends = fault.mended_at + (NOTICE_S if fault.kind in LOSING else 0.0)
        times = [at for at, lost in losses if lost == address and fault.at - 0.002 <= at <= ends]
        found.append(Noticed(fault, min(times) - fault.at if times else None))
    return found


@dataclass(frozen=True, slots=True)
class Lag:
    """This process did not run for ``seconds`` until ``at``, and so others may not have run either."""

    at: float
    seconds: float


def late(noticed: Iterable[Noticed], lags: Sequence[Lag], spare_s: float) -> list[str]:
    """Return the losses that were not noticed within `NOTICE_S`, ``spare_s`` and the lag of that time."""
    problems = []
    for one in noticed:
        if one.fault.kind in LOSING:
            at, after_s = one.fault.at, one.after_s
            if after_s is None:
                problems.append(f"{one.fault} was not noticed")
                continue
            lag_s = sum(lag.seconds for lag in lags if at <= lag.at <= at + after_s + lag.seconds)
            if after_s > NOTICE_S + lag_s + spare_s:
                problems.append(f"{one.fault} was noticed after {after_s:.2f} s; lag {lag_s:.2f} s")
    return problems


def worst_pause(fault: Fault, answers: Iterable[Answer], window_s: float) -> float:
    """Return the longest time without a token of a stream that ran when ``fault`` began, in its first seconds."""
    gaps = [
        after - before
        for answer in answers
        for before, after in pairwise(answer.times)
        if answer.times[0] < fault.at < answer.times[-1] and before <= fault.at + window_s and after >= fault.at
    ]
    return max(gaps, default=0.0)


@dataclass(frozen=True, slots=True)
class Texts:
    """How many answers are equal to the undisturbed ones, the gaps in logits of the others, and what is wrong."""

    equal: int
    gaps: list[float]
    problems: list[str]

    def __str__(self) -> str:
        gaps = ", ".join(f"{gap:.2f}" for gap in sorted(self.gaps, reverse=True)[:10])
        return (
            f"{self.equal} equal to the undisturbed ones, {len(self.gaps)} not; largest gaps in logits: {gaps or '-'}"
        )


def compare(answers: Iterable[Answer], expected: dict[Ask, list[int]], oracle: Oracle) -> Texts:
    """Compare each answer with the undisturbed one. In a text that differs, each token must be one of a near tie."""
    equal, gaps, problems = 0, [], []
    for answer in answers:
        ask, tokens = answer.ask, answer.tokens
        if answer.problem is not None:
            waited_s = answer.times[-1] - answer.times[-2]
            problems.append(f"{answer.problem} after {len(tokens)} tokens, {waited_s:.1f} s without one")
        elif tokens == expected[ask]:
            equal += 1
        else:
            gaps.append(_gap(oracle, ask, tokens))
            if gaps[-1] > TIE_LOGITS:
                problems.append(f"a token is {gaps[-1]:.2f} logits behind the right one: {ask}, {tokens}")
            if len(tokens) != ask.new_tokens and tokens[-1] != oracle.llama.token_eos():
                problems.append(f"{len(tokens)} tokens of {ask.new_tokens} without an end: {ask}, {tokens}")
    return Texts(equal, gaps, problems)


def _gap(oracle: Oracle, ask: Ask, tokens: list[int]) -> float:
    if ask.seed is None:
        return greedy_gap(oracle, ask.prompt, tokens)
    return draw_gap(oracle, ask.prompt, ask.seed, tokens)


def held(metrics: str) -> list[str]:
    """Return what router and shards still hold, though nothing runs."""
    names = ("caravan_kv_cells_used", "caravan_sequences_running", "caravan_sequences_swapped", "tgi_queue_size")
    values = {name: total(metrics, name) for name in names}
    return [f"{name} is {value:g} at rest" for name, value in values.items() if value]


def table(noticed: Sequence[Noticed], answers: Sequence[Answer]) -> str:
    """Return a line for each kind of fault: how many, how many were taken for a loss, the worst times."""
    by_kind: dict[Kind, list[Noticed]] = defaultdict(list)
    for one in noticed:
        by_kind[one.fault.kind].append(one)
    lines = [f"{'fault':40} {'times':>5} {'losses':>6} {'worst notice':>12} {'worst pause':>11}"]
    for kind in Kind:
        found = by_kind[kind]
        times = [one.after_s for one in found if one.after_s is not None]
        notice = f"{max(times):.2f} s" if times else "-"
        pause = max((worst_pause(one.fault, answers, NOTICE_S) for one in found), default=0.0)
        lines.append(f"{kind.value:40} {len(found):5} {len(times):6} {notice:>12} {pause:9.2f} s")
    return "\n".join(lines)
