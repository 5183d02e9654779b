"""The timeline of one model."""

from collections.abc import Callable, Iterable

from caravan_scheduler.actions import Action
from caravan_scheduler.events import Event
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.timeline.figures import RecentFigures
from caravan_studio.timeline.lanes import Lanes
from caravan_studio.timeline.messages import Frame, State
from caravan_studio.timeline.picture import shard_pictures, waiting_pictures

# Seconds between two messages of a kind.
FRAME_S = 0.25
STATE_S = 1.0


class ModelTimeline:
    """Follows a scheduler that `note` is told of, from ``now`` on. ``name_of``: returns what an API key is called."""

    def __init__(
        self, model: str, scheduler: Scheduler, now: float, name_of: Callable[[str], str] = lambda name: name
    ) -> None:
        self._model = model
        self._name_of = name_of
        self._scheduler = scheduler
        self._figures = RecentFigures(now)
        self._lanes = Lanes(scheduler, self._figures, now)
        self._next_frame_s = now + FRAME_S
        self._next_state_s = now

    def note(self, events: Iterable[Event], actions: list[Action], now: float) -> None:
        """Note what happened, and what the scheduler decided then."""
        self._lanes.note(events, actions, now)

    def hear(self, events: list[Event]) -> None:
        """Do nothing: what happened is told with what was decided."""

    def messages(self, now: float) -> list[Frame | State]:
        """Return what is due: a frame if anything happened, and the state."""
        found: list[Frame | State] = []
        if now >= self._next_frame_s:
            self._next_frame_s = now + FRAME_S
            blocks, marks = self._lanes.take(now)
            if blocks or marks:
                found.append(Frame(model=self._model, at=round(now, 6), blocks=blocks, marks=marks))
        if now >= self._next_state_s:
            self._next_state_s = now + STATE_S
            found.append(self._state(now))
        return found

    def _state(self, now: float) -> State:
        return State(
            model=self._model,
            at=round(now, 6),
            shards=shard_pictures(self._scheduler),
            queue=waiting_pictures(self._scheduler, now, self._name_of),
            queued=len(self._scheduler.waiting),
            figures=self._figures.figures(now),
        )
