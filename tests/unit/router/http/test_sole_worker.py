"""How servers of one database look for work."""

import asyncio

import pytest

from caravan_router.http.server import sole_worker
from caravan_router.http.server.sole_worker import SoleWorker, Work
from caravan_testing.waiting import eventually


async def test_a_look_that_fails_is_not_the_last_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sole_worker, "_SHARED_POLL_S", 0.001)
    looks, left, ending = list[int](), asyncio.Event(), asyncio.Event()

    async def look() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            raise ValueError("a record of a later version")

    async def leave() -> None:
        left.set()

    worker = SoleWorker("postgresql://host/name", ending, Work(look, leave))
    await worker.start()
    try:
        await eventually(lambda: len(looks) > 3, "it looks again")
        assert "a record of a later version" in caplog.text
        ending.set()
        await left.wait()
    finally:
        await worker.close()
