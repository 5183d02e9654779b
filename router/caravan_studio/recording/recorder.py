"""Records what the schedulers of a router hear and decide."""

import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import caravan_proto
from caravan_scheduler.actions import Action
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import (
    Event,
    FlushRequested,
    PinRequested,
    RunsFound,
    ShardJoined,
    Stepped,
    Submitted,
    Taken,
)
from caravan_scheduler.pins import Pin
from caravan_scheduler.prefix_keys import PrefixKeys
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_studio.recording.line_file import LineFile
from caravan_studio.recording.lines import VERSION, CallLine, Header, Line, SchedulerLine, Told, config_of
from caravan_studio.recording.names import CommonNames, Names
from caravan_studio.recording.write_actions import write_actions
from caravan_studio.recording.write_events import EventWriter
from caravan_studio.timeline.messages import Hello, Message
from caravan_studio.timeline.model_timeline import FRAME_S, STATE_S, ModelTimeline

if TYPE_CHECKING:
    from caravan_studio.recording import events as form

_log = logging.getLogger(__name__)

_ENDLESS = 1 << 62
# A disk that is so far behind ends the recording.
_MOST_WAITING_BYTES = 64 << 20

_encode = msgspec.json.Encoder().encode


class RecordFileError(Exception):
    """The file of the recording cannot be written."""


class Recorder:
    """One recording, of all schedulers that `follow` is told of when they are new.

    It begins with them, so that what they know need not be written, and ends before the router if its space is full.
    """

    def __init__(self, path: Path, *, most_bytes: int = _ENDLESS, keeps_tokens: bool = False) -> None:
        """Begin a recording of about ``most_bytes`` at most. One that is there is kept. Raises RecordFileError."""
        self._path = path
        self._most_bytes = most_bytes
        self._schedulers = 0
        self._names = CommonNames.begin(keeps_tokens=keeps_tokens)
        # Whether it has ended, since its space or the disk is full, or the disk too slow.
        self.has_ended = False
        try:
            if path.exists():
                path.replace(path.with_name(f"{path.name}.1"))
            self._file = LineFile(path)
        except OSError as error:
            raise RecordFileError(f"{path}: {error.strerror}") from error
        now, unix = time.monotonic(), time.time()
        tokens = "real" if keeps_tokens else "numbered"
        header = Header(version=VERSION, release=caravan_proto.__version__, at=now, unix=unix, tokens=tokens)
        self.write(Line(caravan_recording=header))
        self.write_page(Hello(at=now, unix=unix, frame_s=FRAME_S, state_s=STATE_S))

    def follow(self, model: str, scheduler: Scheduler, config: SchedulerConfig) -> "SchedulerRecorder":
        """Return the follower of a scheduler that has not begun."""
        self._schedulers += 1
        line = SchedulerLine(id=self._schedulers, model=model, config=config_of(config))
        self.write(Line(scheduler=line))
        return SchedulerRecorder(self, line, scheduler, Names(self._names))

    def write(self, line: Line) -> None:
        """Write a line, which is the last one if the space is full then."""
        if self.has_ended:
            return
        if self._file.failed or self._file.waiting_bytes >= _MOST_WAITING_BYTES:
            self._end("the disk is full or too slow")
            return
        self._file.write([_encode(line), b"\n"])
        if self._file.written_bytes >= self._most_bytes:
            reason = "its space was full"
            self._file.write([_encode(Line(ended=reason)), b"\n"])
            self._end(reason)

    def write_page(self, message: Message) -> None:
        """Write a message of the timeline."""
        self.write(Line(page=msgspec.Raw(_encode(message))))

    def _end(self, reason: str) -> None:
        self.has_ended = True
        self._file.end()
        _log.error("the recording has ended", extra={"file": str(self._path), "reason": reason})

    def close(self) -> None:
        """Write what is left, which blocks."""
        self._file.end()
        self._file.wait()


class SchedulerRecorder:
    """Records one scheduler."""

    def __init__(self, recorder: Recorder, line: SchedulerLine, scheduler: Scheduler, names: Names) -> None:
        self._recorder = recorder
        self._line = line
        self._scheduler = scheduler
        self._names = names
        self._events = EventWriter(names, scheduler)
        # It begins with the first call, on the clock of the scheduler.
        self._timeline: ModelTimeline | None = None
        self._heard: list[form.Event] = []
        # Sequences that get tokens now, and how many at most.
        self._growing: list[tuple[Sequence, int]] = []

    def hear(self, events: list[Event]) -> None:
        """Note what the scheduler is about to handle: afterwards, it may know less of it."""
        if self._recorder.has_ended:
            return
        self._heard = [self._events.write(event) for event in events]
        if self._names.has_untold:
            self._foresee(events)

    def _foresee(self, events: list[Event]) -> None:
        """Tell the tokens of prefixes that come or are known, and note which ones are about to grow."""
        for event in events:
            match event:
                case Submitted():
                    self._tell(Sequence(event.request))
                case Taken():
                    for sequence in event.sequences:
                        self._tell(sequence)
                case PinRequested():
                    self._tell_pin(event.pin)
                    self._tell_all()
                case ShardJoined() | RunsFound() | FlushRequested():
                    self._tell_all()
                case Stepped():
                    shard = self._scheduler.shards.get(event.shard)
                    begun = None if shard is None else shard.commands.find(event.command_id)
                    if begun is not None:
                        counts = Counter(sequence_id for sequence_id, _ in event.tokens)
                        residents = begun.residents
                        self._growing += [(residents[id_].sequence, counts[id_]) for id_ in counts if id_ in residents]
                case _:
                    pass

    def _tell_all(self) -> None:
        """Tell the tokens of all sequences, also those that have ended and whose cells are kept."""
        for sequence in self._scheduler.sequences.values():
            self._tell(sequence)
        for shard in self._scheduler.shards.values():
            for resident in (*shard.stays.parked.values(), *shard.stays.residents.values()):
                self._tell(resident.sequence)

    def _tell(self, sequence: Sequence, after: int = -1) -> None:
        """Tell the tokens of a sequence if events have named prefixes of it that are longer than ``after``."""
        told = self._names.tell(sequence.keys, range(after + 1, sequence.known_tokens + 1))
        if told:
            tokens = sequence.tokens(0, told[-1][0])
            self._write_told(sequence.request.prefix_namespace, sequence.spec.adapter, tokens, told)

    def _tell_pin(self, pin: Pin) -> None:
        if pin.namespace is None:
            return
        keys = PrefixKeys(pin.namespace, lambda start, stop: pin.tokens[start:stop])
        told = self._names.tell(keys, range(len(pin.tokens) + 1))
        if told:
            self._write_told(pin.namespace, pin.adapter, pin.tokens, told)

    def _write_told(self, namespace: str, adapter: str, tokens: Iterable[int], told: list[tuple[int, int]]) -> None:
        names = self._names
        line = Told(self._line.id, names.namespace(namespace), adapter, names.tokens(tokens), told)
        self._recorder.write(Line(told=line))

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        """Record what happened, and what the scheduler decided then."""
        if self._recorder.has_ended:
            return
        if self._timeline is None:
            self._timeline = ModelTimeline(self._line.model, self._scheduler, now, self._names)
        self._timeline.note(events, actions, now)
        for message in self._timeline.messages(now):
            self._recorder.write_page(message)
        for sequence, count in self._growing:
            self._tell(sequence, sequence.known_tokens - count)
        self._growing.clear()
        if self._names.has_untold and any(isinstance(event, Stepped) and event.evaluations for event in events):
            self._tell_all()  # of a beam search, any token of an output may be another one now
        decided = write_actions(actions, self._names)
        self._recorder.write(Line(call=CallLine(self._line.id, now, self._heard, decided)))
        self._names.forget_keys(self._scheduler)
