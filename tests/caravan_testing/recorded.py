"""Recordings of simulated schedulers, and what is different when they are played again."""

from collections.abc import Iterable
from pathlib import Path

from caravan_router.recording.read_lines import RecordingFile
from caravan_router.recording.recorder import Recorder
from caravan_router.replay.player import Difference, Player, play
from caravan_router.scheduling.actions import Action
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import Event
from caravan_router.scheduling.scheduler import Scheduler


def record(scheduler: Scheduler, config: SchedulerConfig, recorder: Recorder) -> None:
    """Record what a scheduler, which has not begun, hears and decides from now on."""
    follower = recorder.follow("toy", scheduler, config)
    handle = scheduler.handle

    def handle_and_note(events: Iterable[Event], now: float) -> list[Action]:
        heard = list(events)
        follower.hear(heard)
        try:
            actions = handle(heard, now)
        except Exception as error:
            follower.note_error(error, now)
            raise
        follower.note(heard, actions, now)
        return actions

    scheduler.handle = handle_and_note  # type: ignore[method-assign]


def differences(path: Path) -> list[Difference]:
    """Play a recording again. Return the differences of the first call that has any."""
    for played in play(RecordingFile(path), Player()):
        if played.differences:
            return played.differences
    return []


def calls(path: Path) -> int:
    """Return how many calls a recording has."""
    return sum(1 for _ in play(RecordingFile(path), Player()))
