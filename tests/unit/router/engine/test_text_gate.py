"""Calls with texts take fair turns."""

import asyncio

import pytest

from caravan_router.engine.text_gate import SHORT_BYTES, TextGate, TextLanes
from caravan_scheduler.core.engine import ANY_SENDER, TEXT_SENDER, TextSender
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.waiting.text_queue import LEAST_ROOM, TextQueue

LONG = 8 * SHORT_BYTES


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


class LaneCalls:
    """LaneCalls that are under way until they are told to end. ``shards``: how many are up."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.lanes = TextLanes(60.0, lambda: self.shards)
        self.passed: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def _call(self, name: str, sender: str, size: int) -> None:
        TEXT_SENDER.set(TextSender(tenant=Tenant(name=sender)))
        async with self.lanes.passing(size):
            self.passed.append(name)
            await self._ends[name].wait()

    async def begin(self, name: str, sender: str, size: int) -> None:
        self._ends[name] = asyncio.Event()
        self._tasks.append(asyncio.create_task(self._call(name, sender, size)))
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await settle()

    async def end_all(self) -> None:
        for event in self._ends.values():
            event.set()
        await asyncio.gather(*self._tasks)


async def test_long_texts_of_one_key_hold_neither_short_ones_nor_the_long_one_of_another() -> None:
    calls = LaneCalls(shards=1)
    for number in range(20):
        await calls.begin(f"ann {number}", "ann", LONG)
    await calls.begin("short", "bob", 100)
    await calls.begin("long", "bob", LONG)
    assert calls.passed == ["ann 0", "short"]
    await calls.end("ann 0")
    # A key that comes is not behind, and has none of its turns saved up: of two that had as much, the first goes first.
    await calls.end("ann 1")
    assert calls.passed == ["ann 0", "short", "ann 1", "long"]
    await calls.end("long")
    assert calls.passed[4:] == ["ann 2"]
    await calls.end_all()


async def test_many_short_texts_of_one_key_leave_others_their_turns() -> None:
    calls = LaneCalls(shards=1)
    for number in range(50):
        await calls.begin(f"ann {number}", "ann", SHORT_BYTES)
    passed = len(calls.passed)
    assert 2 <= passed < 50
    await calls.begin("bob", "bob", 100)
    await calls.end("ann 0")
    await calls.end("ann 1")
    assert "bob" in calls.passed[passed:]
    await calls.end_all()


async def test_each_shard_takes_a_long_text_and_without_any_all_wait_for_one_at_once() -> None:
    calls = LaneCalls(shards=2)
    for name in "abc":
        await calls.begin(name, "ann", LONG)
    assert calls.passed == ["a", "b"]
    calls.shards = 0
    await calls.end("a")
    assert calls.passed == ["a", "b", "c"]
    await calls.begin("d", "ann", LONG)
    assert calls.passed == ["a", "b", "c", "d"]
    await calls.end_all()
