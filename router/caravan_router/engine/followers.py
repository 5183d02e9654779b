"""Those who are told what the scheduler of one model hears and decides. Serving does not depend on them."""

import logging
from collections.abc import Callable
from typing import Protocol

from caravan_scheduler.actions import Action
from caravan_scheduler.events import Event

_log = logging.getLogger(__name__)


class Follower(Protocol):
    """Is told what a scheduler hears and decides."""

    def hear(self, events: list[Event]) -> None:
        """Note what the scheduler is about to handle."""
        ...

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        """Note what the scheduler has decided because of ``events``. The actions are not carried out yet."""
        ...


class Followers:
    """One that raises an exception, which is a bug, is told nothing any more; the others are, and requests go on."""

    def __init__(self) -> None:
        self._followers: list[Follower] = []

    def __len__(self) -> int:
        return len(self._followers)

    def append(self, follower: Follower) -> None:
        """Tell one more."""
        self._followers.append(follower)

    def remove(self, follower: Follower) -> None:
        """Tell one no more, if it is told anything still."""
        if follower in self._followers:
            self._followers.remove(follower)

    def hear(self, events: list[Event]) -> None:
        """Tell all what the scheduler is about to handle."""
        self._tell(lambda follower: follower.hear(events))

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        """Tell all what the scheduler has decided."""
        self._tell(lambda follower: follower.note(events, actions, now))

    def _tell(self, tell: Callable[[Follower], None]) -> None:
        for follower in tuple(self._followers):
            try:
                tell(follower)
            except Exception:  # noqa: BLE001  whatever a bug raises
                name = type(follower).__name__
                _log.exception("a follower of a scheduler failed and is removed", extra={"follower": name})
                self.remove(follower)
