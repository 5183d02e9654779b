"""Viewers that read slowly, and how many there may be."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from caravan_router.engine.viewers import Viewers
from caravan_studio.timeline.messages import Gone, Message


def decoded(message: bytes) -> Any:
    return msgspec.json.decode(message)


async def opened(viewers: Viewers) -> AsyncGenerator[bytes, None]:
    """Let one more watch, who has read the first message."""
    messages = viewers.messages()
    assert messages is not None
    assert decoded(await anext(messages))["type"] == "hello"
    return messages


async def test_who_reads_too_slowly_misses_messages_and_is_told_how_many() -> None:
    viewers = Viewers([])
    messages = await opened(viewers)
    sent: list[Message] = [Gone(model=str(number), at=0.0) for number in range(100)]
    for message in sent:
        viewers._put(message)
    assert [decoded(await anext(messages))["model"] for _ in range(64)] == [str(number) for number in range(64)]
    viewers._put(Gone(model="last", at=0.0))
    assert decoded(await anext(messages)) == {"type": "dropped", "count": 36}
    assert decoded(await anext(messages))["model"] == "last"
    await messages.aclose()


async def test_there_are_at_most_so_many_viewers_and_one_that_leaves_makes_room() -> None:
    viewers = Viewers([])
    watching = [await opened(viewers) for _ in range(16)]
    assert viewers.messages() is None
    await watching.pop().aclose()
    watching.append(await opened(viewers))
    for messages in watching:
        await messages.aclose()


async def test_nothing_runs_once_nobody_watches() -> None:
    viewers = Viewers([])
    messages = await opened(viewers)
    assert viewers._telling is not None
    reading = asyncio.ensure_future(anext(messages))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await messages.aclose()
    assert viewers._telling is None
