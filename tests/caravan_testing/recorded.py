"""Recordings of simulated schedulers, and what is different when they are played again."""

from collections.abc import Iterable
from pathlib import Path

from caravan_scheduler import recovery
from caravan_scheduler.actions import Action
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Event
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.recording.lines import RecordingFile
from caravan_studio.recording.recorder import Recorder, SchedulerRecorder
from caravan_studio.replay.player import Difference, Player, play


class RecordedScheduler(Scheduler):
    """A scheduler that is recorded: it is in front of the one that decides, and has the same state.

    It goes on after a bug, as in the router. Callers must see to it that there is no `Faulted` where there is no bug.
    """

    def __init__(self, scheduler: Scheduler, follower: SchedulerRecorder) -> None:
        self._scheduler = scheduler
        self._follower = follower
        self.__dict__ |= scheduler.__dict__

    def handle(self, events: Iterable[Event], now: float) -> list[Action]:
        """Let the scheduler handle ``events``, and the recorder know."""
        heard = list(events)
        self._follower.hear(heard)
        actions = recovery.handle(self._scheduler, heard, now)
        self.__dict__ |= self._scheduler.__dict__
        self._follower.note(heard, actions, now)
        return actions


def recorded(scheduler: Scheduler, config: SchedulerConfig, recorder: Recorder) -> RecordedScheduler:
    """Record what a scheduler, which has not begun, hears and decides from now on."""
    return RecordedScheduler(scheduler, recorder.follow("toy", scheduler, config))


def differences(path: Path) -> list[Difference]:
    """Play a recording again. Return the differences of the first call that has any."""
    for played in play(RecordingFile(path), Player()):
        if played.differences:
            return played.differences
    return []


def calls(path: Path) -> int:
    """Return how many calls a recording has."""
    return sum(1 for _ in play(RecordingFile(path), Player()))
