"""Runs the workload ``agents``: all agents at the same time, and the chat for as long as any of them works."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from caravan_serve.bench.agents import AgentPlan, Chat, Turn
from caravan_serve.bench.client_sse import SseClient
from caravan_serve.bench.request import BenchRequest, RequestResult, StreamRecord
from caravan_serve.bench.statistics import Distribution, distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsResult:
    """``session_s``: from an agent's first request to its last answer, its tools included.

    ``return_ttft_s``: of the requests after a tool. ``computed_share``: of all prompt tokens of the agents, those that
    the server did not have; None if it does not say. ``requests`` and ``completed`` are those of agents. ``failures``:
    one message for each request that failed, of the chat too; a session ends there.
    """

    agents: int
    requests: int
    completed: int
    session_s: Distribution | None
    first_ttft_s: Distribution | None
    return_ttft_s: Distribution | None
    chat_ttft_s: Distribution | None
    prompt_tokens: int
    computed_share: float | None
    output_tokens: int
    duration_s: float
    failures: tuple[str, ...]


@dataclass(slots=True)
class _Collected:
    first: list[RequestResult] = field(default_factory=list)
    returned: list[RequestResult] = field(default_factory=list)
    chat: list[RequestResult] = field(default_factory=list)
    sessions_s: list[float] = field(default_factory=list)

    @property
    def of_agents(self) -> list[RequestResult]:
        return self.first + self.returned


async def run_agents(client: SseClient, plans: Sequence[AgentPlan], chat: Chat) -> AgentsResult:
    """Run the sessions of an agent for each of ``plans``, beside ``chat``."""
    collected = _Collected()
    started = time.perf_counter()
    chatting = asyncio.create_task(_chat(client, chat, collected.chat))
    try:
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(_timed_session(client, plan, collected))
    finally:
        chatting.cancel()
        await asyncio.wait({chatting})
    return _result(collected, len(plans), time.perf_counter() - started)


async def _timed_session(client: SseClient, plan: AgentPlan, collected: _Collected) -> None:
    started = time.perf_counter()
    if await _session(client, plan, collected) is not None:
        collected.sessions_s.append(time.perf_counter() - started)


async def _session(client: SseClient, plan: AgentPlan, collected: _Collected) -> str | None:
    """Return the last answer; None if a request has failed."""
    history = _History(plan.system)
    for number, turn in enumerate(plan.turns):
        answered = "" if turn.sub_agent is None else await _session(client, turn.sub_agent, collected)
        if answered is None:
            return None
        await asyncio.sleep(turn.gap_s)
        result = await history.ask(client, turn, answered)
        (collected.returned if number else collected.first).append(result)
        if result.failure is not None:
            return None
    return history.answer


async def _chat(client: SseClient, chat: Chat, results: list[RequestResult]) -> None:
    """Chat until cancelled."""
    history = _History("")
    while True:
        turn = chat.next_turn()
        await asyncio.sleep(turn.gap_s)
        results.append(await history.ask(client, turn))


class _History:
    """What is sent again with every turn, and the last answer."""

    def __init__(self, system: str) -> None:
        self._system = system
        self._text = system
        self.answer = ""

    async def ask(self, client: SseClient, turn: Turn, before: str = "") -> RequestResult:
        """Send the history with ``before`` and the text of ``turn``, and add them and the answer to it."""
        if turn.summary is not None:
            self._text = f"{self._system}\n{turn.summary}"
        self._text += f"\n{before}\n{turn.text}\n"
        record = StreamRecord(texts={})
        result = await client.run(BenchRequest(prompt=self._text, max_tokens=turn.tokens), record=record)
        self.answer = record.text_of(0)
        self._text += self.answer
        return result


def _result(collected: _Collected, agents: int, duration_s: float) -> AgentsResult:
    results = [*collected.of_agents, *collected.chat]
    completed = [one for one in collected.of_agents if one.failure is None]
    prompt_tokens = sum(one.prompt_tokens or 0 for one in completed)
    return AgentsResult(
        agents=agents,
        requests=len(collected.of_agents),
        completed=len(completed),
        session_s=distribution(collected.sessions_s),
        first_ttft_s=_ttft(collected.first),
        return_ttft_s=_ttft(collected.returned),
        chat_ttft_s=_ttft(collected.chat),
        prompt_tokens=prompt_tokens,
        computed_share=_computed_share(completed, prompt_tokens),
        output_tokens=sum(one.output_tokens for one in completed),
        duration_s=duration_s,
        failures=tuple(one.failure.message for one in results if one.failure is not None),
    )


def _computed_share(completed: Sequence[RequestResult], prompt_tokens: int) -> float | None:
    cached = [one.cached_tokens for one in completed if one.cached_tokens is not None]
    return 1 - sum(cached) / prompt_tokens if prompt_tokens and len(cached) == len(completed) else None


def _ttft(results: Sequence[RequestResult]) -> Distribution | None:
    return distribution(
        [one.first_token - one.scheduled for one in results if one.failure is None and one.first_token is not None]
    )
