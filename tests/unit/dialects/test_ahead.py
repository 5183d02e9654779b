"""The same work on many items: together, in order, and with one error."""

import asyncio
from contextlib import aclosing

import pytest

from caravan_dialects.ahead import ahead, each


class Work:
    """Work on numbers that waits until the test lets it end."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.ends: dict[int, asyncio.Future[int]] = {}

    async def on(self, number: int) -> int:
        self.begun.append(number)
        self.ends[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.ends[number]
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise


async def _turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_few_items_are_worked_on_at_once_and_results_keep_their_order() -> None:
    work, results = Work(), list[int]()

    async def read() -> None:
        async for result in ahead(range(5), work.on, at_once=3):
            results.append(result)

    reading = asyncio.create_task(read())
    await _turns()
    assert work.begun == [0, 1, 2]
    work.ends[1].set_result(10)
    await _turns()
    assert (work.begun, results) == ([0, 1, 2], [])
    work.ends[0].set_result(0)
    await _turns()
    assert (work.begun, results) == ([0, 1, 2, 3, 4], [0, 10])
    for number in (4, 3, 2):
        work.ends[number].set_result(number * 10)
    await reading
    assert results == [0, 10, 20, 30, 40]


async def test_the_error_of_the_earliest_item_is_raised_and_ends_the_work_on_the_others() -> None:
    work = Work()
    reading = asyncio.create_task(each(range(4), work.on))
    await _turns()
    work.ends[2].set_exception(ValueError("the third"))
    await _turns()
    assert not reading.done()
    work.ends[0].set_result(0)
    work.ends[1].set_exception(ValueError("the second"))
    with pytest.raises(ValueError, match="the second"):
        await reading
    assert work.cancelled == [3]


async def test_closing_and_cancelling_end_the_work() -> None:
    work = Work()
    async with aclosing(ahead(range(9), work.on, at_once=2)) as results:
        first = asyncio.create_task(anext(results))
        await _turns()
        work.ends[0].set_result(0)
        assert await first == 0
    assert (work.begun, work.cancelled) == ([0, 1], [1])
    reading = asyncio.create_task(each(range(2), work.on))
    await _turns()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert sorted(work.cancelled) == [0, 1, 1]


async def test_no_items_have_no_results() -> None:
    assert await each([], Work().on) == []
