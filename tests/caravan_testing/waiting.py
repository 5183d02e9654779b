"""Waiting for what sets no event."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], what: str = "the condition", within_s: float = 60.0) -> None:
    """Poll until ``condition`` holds. Fail after ``within_s``, which is long because the machine may be busy."""
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"not within {within_s:g} s: {what}") from None
