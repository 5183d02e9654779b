"""Records what the schedulers of a router hear and decide."""

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import caravan_proto
from caravan_router.recording.lines import VERSION, CallLine, Header, Line, SchedulerLine, config_of
from caravan_router.recording.names import Names
from caravan_router.recording.part_file import PartFile
from caravan_router.recording.write_actions import write_actions
from caravan_router.recording.write_events import EventWriter
from caravan_router.scheduling.actions import Action
from caravan_router.scheduling.config import SchedulerConfig
from caravan_router.scheduling.events import Event
from caravan_router.scheduling.scheduler import Scheduler
from caravan_router.timeline.messages import Hello, Message
from caravan_router.timeline.model_timeline import FRAME_S, STATE_S, ModelTimeline

if TYPE_CHECKING:
    from caravan_router.recording import events as form

_log = logging.getLogger(__name__)

_ENDLESS = 1 << 62
# A disk that is so far behind ends the recording.
_MOST_WAITING_BYTES = 64 << 20

_encode = msgspec.json.Encoder().encode


class RecordFileError(Exception):
    """The file of the recording cannot be written."""


class Recorder:
    """One recording, of all schedulers that `follow` is told of when they are new."""

    def __init__(self, path: Path, *, most_bytes: int = _ENDLESS, keeps_tokens: bool = False) -> None:
        """Begin a recording in a file, which ends when it has ``most_bytes``. Raises RecordFileError."""
        self._most_bytes = most_bytes
        try:
            self._file = PartFile(path)
        except OSError as error:
            raise RecordFileError(f"{path}: {error.strerror}") from error
        self._names = Names(keeps_tokens=keeps_tokens)
        self._schedulers = 0
        self.is_full = False
        now = time.monotonic()
        header = Header(
            version=VERSION,
            release=caravan_proto.__version__,
            at=now,
            unix=time.time(),
            tokens="real" if keeps_tokens else "numbered",
        )
        self._write(Line(caravan_recording=header))
        self.write_page(Hello(at=now, unix=header.unix, frame_s=FRAME_S, state_s=STATE_S))

    def follow(self, model: str, scheduler: Scheduler, config: SchedulerConfig) -> "SchedulerRecorder":
        """Return the follower of a scheduler that has not begun."""
        self._schedulers += 1
        line = SchedulerLine(id=self._schedulers, model=model, config=config_of(config))
        self._write(Line(scheduler=line))
        timeline = ModelTimeline(model, scheduler, time.monotonic(), self._names.tenant)
        return SchedulerRecorder(self, self._schedulers, EventWriter(self._names, scheduler), timeline)

    @property
    def names(self) -> Names:
        """The names of this recording."""
        return self._names

    def write_call(self, call: CallLine) -> None:
        """Write what a scheduler heard and decided."""
        self._write(Line(call=call))

    def write_page(self, message: Message) -> None:
        """Write a message of the timeline."""
        self._write(Line(page=msgspec.Raw(_encode(message))))

    def _write(self, line: Line) -> None:
        if self.is_full:
            return
        if self._file.written_bytes >= self._most_bytes or self._file.waiting_bytes >= _MOST_WAITING_BYTES:
            self.is_full = True
            _log.warning("the recording is full", extra={"bytes": self._file.written_bytes})
            return
        self._file.write([_encode(line), b"\n"])

    def close(self) -> None:
        """Write what is left, which blocks."""
        self._file.close()


class SchedulerRecorder:
    """Records one scheduler."""

    def __init__(self, recorder: Recorder, number: int, events: EventWriter, timeline: ModelTimeline) -> None:
        self._recorder = recorder
        self._number = number
        self._events = events
        self._timeline = timeline
        self._heard: list[form.Event] = []

    def hear(self, events: list[Event]) -> None:
        """Note what the scheduler is about to handle: afterwards, it may know less of it."""
        self._heard = [self._events.write(event) for event in events]

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        """Record what happened, and what the scheduler decided then."""
        decided = write_actions(actions, self._recorder.names)
        self._recorder.write_call(CallLine(self._number, now, self._heard, decided))
        self._timeline.note(events, actions, now)
        for message in self._timeline.messages(now):
            self._recorder.write_page(message)

    def note_error(self, error: Exception, now: float) -> None:
        """Record what happened when the scheduler raised an error, which is a bug."""
        self._recorder.write_call(CallLine(self._number, now, self._heard, [], type(error).__name__))
