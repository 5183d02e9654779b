"""A follower that has a bug is dropped; the others are told on, and what is served does not notice."""

import logging
from collections.abc import Iterator

import pytest

from caravan_router.engine.followers import Followers
from caravan_scheduler.actions import Action
from caravan_scheduler.events import Event, Tick


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
