"""Calls with texts wait for their turn, and leave it when they end in any way."""

import asyncio

import pytest

from caravan_router.engine.text_gate import TextGate
from caravan_scheduler.core.engine import ANY_SENDER, TextSender
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.waiting.text_queue import LEAST_ROOM, TextQueue


class Calls:
    """Calls as large as all room of the one shard, so that one passes at a time until it is told to end."""

    def __init__(self) -> None:
        self.gate = TextGate(TextQueue(), lambda: LEAST_ROOM)
        self.passed: list[str] = []
        self.ends = asyncio.Semaphore(0)

    async def _call(self, name: str, sender: TextSender) -> None:
        async with self.gate.passing(LEAST_ROOM, sender):
            self.passed.append(name)
            await self.ends.acquire()
            if name == "fails":
                raise RuntimeError("a bug")

    def begin(self, name: str, sender: TextSender = ANY_SENDER) -> asyncio.Task[None]:
        return asyncio.create_task(self._call(name, sender))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_call_passes_when_another_has_ended_or_failed() -> None:
    calls = Calls()
    tasks = [calls.begin(name) for name in ("fails", "second", "third")]
    await settle()
    assert calls.passed == ["fails"]
    calls.ends.release()
    with pytest.raises(RuntimeError, match="a bug"):
        await tasks[0]
    await settle()
    assert calls.passed == ["fails", "second"]
    calls.ends.release()
    calls.ends.release()
    await asyncio.gather(*tasks[1:])
    assert calls.passed == ["fails", "second", "third"]


async def test_cancelled_calls_leave_whether_they_wait_or_run() -> None:
    calls = Calls()
    running, waiting, last = (calls.begin(name) for name in ("running", "waiting", "last"))
    await settle()
    waiting.cancel()
    await settle()
    assert calls.passed == ["running"]
    running.cancel()
    await settle()
    assert calls.passed == ["running", "last"]
    calls.ends.release()
    await last


async def test_a_call_that_is_cancelled_as_its_turn_comes_passes_the_turn_on() -> None:
    calls = Calls()
    running, waiting, last = (calls.begin(name) for name in ("running", "waiting", "last"))
    await settle()
    running.cancel()
    waiting.cancel()
    await settle()
    assert calls.passed == ["running", "last"]
    calls.ends.release()
    await last


async def test_senders_take_turns_and_urgent_ones_go_first() -> None:
    calls = Calls()
    crowd, other = TextSender(tenant=Tenant(name="crowd")), TextSender(tenant=Tenant(name="other"))
    urgent = TextSender(tenant=Tenant(name="crowd"), priority=1)
    begun = [calls.begin(name, crowd) for name in ("crowd 1", "crowd 2", "crowd 3")]
    begun += [calls.begin("other", other), calls.begin("urgent", urgent)]
    for _ in begun:
        await settle()
        calls.ends.release()
    await asyncio.gather(*begun)
    assert calls.passed == ["crowd 1", "urgent", "other", "crowd 2", "crowd 3"]
