"""Texts to tokenize pass in fair turns of their senders, and short ones beside long ones."""

import asyncio

from caravan_router.engine.text_lanes import SHORT_BYTES, TextLanes
from caravan_scheduler.core.engine import TEXT_SENDER, TextSender
from caravan_scheduler.core.generation import Tenant

LONG = 8 * SHORT_BYTES


class Calls:
    """Calls that are under way until they are told to end. ``shards``: how many are up."""

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


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_long_texts_of_one_key_hold_neither_short_ones_nor_the_long_one_of_another() -> None:
    calls = Calls(shards=1)
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
    calls = Calls(shards=1)
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
    calls = Calls(shards=2)
    for name in "abc":
        await calls.begin(name, "ann", LONG)
    assert calls.passed == ["a", "b"]
    calls.shards = 0
    await calls.end("a")
    assert calls.passed == ["a", "b", "c"]
    await calls.begin("d", "ann", LONG)
    assert calls.passed == ["a", "b", "c", "d"]
    await calls.end_all()
