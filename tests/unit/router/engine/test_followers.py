"""A follower that has a bug is dropped; the others are told on, and what is served does not notice."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest

from caravan_router.engine.followers import Followers
from caravan_router.engine.viewers import Viewers
from caravan_scheduler.actions import Action
from caravan_scheduler.events import Event, Tick
from caravan_studio.timeline.messages import Gone, Message


class Told:
    """Notes what it is told, and raises an exception when it is told ``bad``."""

    def __init__(self, bad: str = "") -> None:
        self.bad = bad
        self.calls: list[str] = []

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.bad:
            raise KeyError(call)

    def hear(self, events: list[Event]) -> None:
        self._note("hear")

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        self._note("note")


def tell(followers: Followers) -> Iterator[int]:
    """Tell everything twice; yield how many followers there are after each."""
    for _ in range(2):
        followers.hear([Tick()])
        yield len(followers)
        followers.note([Tick()], [], 1.0)
        yield len(followers)


@pytest.mark.parametrize(("bad", "counts"), [("hear", [1] * 4), ("note", [2] + [1] * 3)])
def test_one_that_raises_is_dropped_and_logged_and_the_others_are_told_on(
    bad: str, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    followers, broken, well = Followers(), Told(bad), Told()
    followers.append(broken)
    followers.append(well)
    with caplog.at_level(logging.ERROR):
        assert list(tell(followers)) == counts
    assert broken.calls[-1] == bad
    assert len(broken.calls) == len(set(broken.calls))
    assert well.calls == ["hear", "note"] * 2
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    followers.remove(broken)
    followers.remove(well)
    assert not followers


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
