"""Records what the schedulers of a router hear and decide."""

import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

import caravan_proto
from caravan_proto.messages.commands import Save
from caravan_scheduler.actions import Action
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Event, RunsFound, ShardJoined, Stepped, Submitted, Taken
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_studio.recording.events import Replace, Take
from caravan_studio.recording.lines import VERSION, CallLine, Header, Line, SchedulerLine, StateLine, Told, config_of
from caravan_studio.recording.names import Names
from caravan_studio.recording.part_file import PartFile
from caravan_studio.recording.prefixes import PlayedKeys
from caravan_studio.recording.read_state import StateReader
from caravan_studio.recording.run_cells import RunCells
from caravan_studio.recording.untold_keys import UntoldKeys
from caravan_studio.recording.write_actions import write_actions
from caravan_studio.recording.write_events import EventWriter
from caravan_studio.recording.write_state import StateWriter
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

    It has two parts at most, each of which can be played alone: ``path`` and, if there was more, ``path`` with ".1"
    behind it, which is older. A later part begins with the states of the schedulers.
    """

    def __init__(self, path: Path, *, most_bytes: int = _ENDLESS, keeps_tokens: bool = False) -> None:
        """Begin a recording of ``most_bytes`` at most. Raises RecordFileError."""
        self._path = path
        self._part_bytes = most_bytes // 2
        self._schedulers: WeakValueDictionary[int, SchedulerRecorder] = WeakValueDictionary()
        self._count = 0
        self.names = Names(keeps_tokens=keeps_tokens)
        self.cells = RunCells()
        self.untold = UntoldKeys()
        self._tokens = "real" if keeps_tokens else "numbered"
        # How many schedulers have let requests go that no other one has taken yet: a part does not end between.
        self.passing = 0
        # Whether it has ended, since the disk is too slow or full.
        self.has_ended = False
        # The part before, which may not be written to its end.
        self._older: PartFile | None = None
        try:
            self._begin_part()
        except OSError as error:
            raise RecordFileError(f"{path}: {error.strerror}") from error

    def _begin_part(self) -> None:
        if self._path.exists():
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = PartFile(self._path)
        self.names.begin_part()
        now, unix = time.monotonic(), time.time()
        header = Header(version=VERSION, release=caravan_proto.__version__, at=now, unix=unix, tokens=self._tokens)
        self._write(Line(caravan_recording=header))
        self.write_page(Hello(at=now, unix=unix, frame_s=FRAME_S, state_s=STATE_S))

    def follow(self, model: str, scheduler: Scheduler, config: SchedulerConfig) -> "SchedulerRecorder":
        """Return the follower of a scheduler that has not begun."""
        self._count += 1
        line = SchedulerLine(id=self._count, model=model, config=config_of(config))
        self._write(Line(scheduler=line))
        follower = self._schedulers[self._count] = SchedulerRecorder(self, line, scheduler)
        return follower

    def write_call(self, call: CallLine) -> None:
        """Write what a scheduler heard and decided, and begin another part if this one is long enough."""
        self._write(Line(call=call))
        size = self._file.written_bytes
        # If a bug has ended the recording of who takes the requests, nobody ever does.
        is_over = size >= 2 * self._part_bytes or (size >= self._part_bytes and self.may_turn_over)
        if is_over and not self.has_ended:
            self._turn_over()

    @property
    def may_turn_over(self) -> bool:
        """Whether a state has all that is known: no requests are between schedulers, nor keys of runs without tokens.

        The latter are of runs that were dropped, as long as their shard has not been told.
        """
        schedulers = [follower.scheduler for follower in self._schedulers.values()]
        shards = [shard for scheduler in schedulers for shard in scheduler.shards.values()]
        return not self.passing and not any(shard.header.dropped_runs for shard in shards)

    def _turn_over(self) -> None:
        self._file.end()
        self._older = self._file
        try:
            self._begin_part()
        except OSError as error:
            self._end(str(error))
            return
        try:
            self._write_states()
        except Exception:  # noqa: BLE001  whatever a bug raises
            # A part without them could not be played.
            _log.exception("the state of a scheduler cannot be written")
            self._end("a bug")

    def _write_states(self) -> None:
        told = PlayedKeys()
        self.untold.clear()
        for number, follower in sorted(self._schedulers.items()):
            self._write(Line(scheduler=follower.line))
            # Their keys are all that it has, and cannot be renamed.
            follower.scheduler.forget_forks()
            nodes = StateWriter(self.names, self.cells).write(follower.scheduler)
            self._write(Line(state=StateLine(id=number, keys=self.names.keys, nodes=nodes)))
            StateReader(nodes, told).note_keys()
            self.untold.note_pins(follower.scheduler.pins, self.names, told.knows)
            for shard in follower.scheduler.shards.values():
                self.untold.note(shard.runs.describe(shard.runs.keys), self.names, told.knows)
            self.tell_all(follower.scheduler)
            self.names.forget_unknown(told.knows)

    def tell(self, sequence: Sequence, after: int = -1) -> None:
        """Write the tokens of prefixes that lines have named though no line had their tokens, if ``sequence`` has any.

        ``after``: shorter ones and those of this length were looked for before.
        """
        keys = self.untold.take(sequence.keys, range(after + 1, sequence.known_tokens + 1))
        if keys:
            root = self.names.root(sequence.request.prefix_namespace)
            tokens = self.names.tokens(sequence.tokens(0, keys[-1][0]))
            self._write(Line(told=Told(root=root, adapter=sequence.spec.adapter, tokens=tokens, keys=keys)))

    def tell_all(self, scheduler: Scheduler) -> None:
        """Do so for all sequences of a scheduler, also those that have ended and whose cells are kept."""
        for sequence in scheduler.sequences.values():
            self.tell(sequence)
        for shard in scheduler.shards.values():
            for resident in (*shard.stays.parked.values(), *shard.stays.residents.values()):
                self.tell(resident.sequence)

    def write_page(self, message: Message) -> None:
        """Write a message of the timeline."""
        self._write(Line(page=msgspec.Raw(_encode(message))))

    def _write(self, line: Line) -> None:
        if self.has_ended:
            return
        if self._file.failed or self._file.waiting_bytes >= _MOST_WAITING_BYTES:
            self._end("the disk is full or too slow")
            return
        self._file.write([_encode(line), b"\n"])

    def _end(self, reason: str) -> None:
        self.has_ended = True
        _log.error("the recording has ended", extra={"file": str(self._path), "reason": reason})

    def close(self) -> None:
        """Write what is left, which blocks."""
        self._file.end()
        for part in (self._older, self._file):
            if part is not None:
                part.wait()


class SchedulerRecorder:
    """Records one scheduler."""

    def __init__(self, recorder: Recorder, line: SchedulerLine, scheduler: Scheduler) -> None:
        self.line = line
        self.scheduler = scheduler
        self._recorder = recorder
        self._events = EventWriter(recorder.names, scheduler, recorder.cells, recorder.untold)
        # It begins with the first call, on the clock of the scheduler.
        self._timeline: ModelTimeline | None = None
        self._heard: list[form.Event] = []
        # Sequences that get tokens now, and how many at most.
        self._growing: list[tuple[Sequence, int]] = []

    def hear(self, events: list[Event]) -> None:
        """Note what the scheduler is about to handle: afterwards, it may know less of it."""
        self._heard = [self._events.write(event) for event in events]
        for event in self._heard:
            if isinstance(event, Replace | Take):
                self._recorder.passing += 1 if isinstance(event, Replace) else -1
        if self._recorder.untold:
            self._foresee(events)

    def _foresee(self, events: list[Event]) -> None:
        """Tell of sequences that come; and note which ones are about to grow, and by how much at most."""
        for event in events:
            match event:
                case Submitted():
                    self._recorder.tell(Sequence(event.request))
                case Taken():
                    for sequence in event.sequences:
                        self._recorder.tell(sequence)
                case Stepped():
                    shard = self.scheduler.shards.get(event.shard)
                    begun = None if shard is None else shard.commands.find(event.command_id)
                    if begun is not None:
                        counts = Counter(sequence_id for sequence_id, _ in event.tokens)
                        residents = begun.residents
                        self._growing += [(residents[id_].sequence, counts[id_]) for id_ in counts if id_ in residents]
                case _:
                    pass

    def note(self, events: list[Event], actions: list[Action], now: float) -> None:
        """Record what happened, and what the scheduler decided then."""
        if self._timeline is None:
            self._timeline = ModelTimeline(self.line.model, self.scheduler, now, self._recorder.names.tenant)
        self._timeline.note(events, actions, now)
        for message in self._timeline.messages(now):
            self._recorder.write_page(message)
        for sequence, count in self._growing:
            self._recorder.tell(sequence, sequence.known_tokens - count)
        self._growing.clear()
        if self._recorder.untold and any(isinstance(event, ShardJoined | RunsFound) for event in events):
            self._recorder.tell_all(self.scheduler)
        for action in actions:
            if type(action) is Save:
                self._recorder.cells.note(action, self.scheduler, self._recorder.names)
        decided = write_actions(actions, self._recorder.names)
        self._recorder.write_call(CallLine(self.line.id, now, self._heard, decided))
