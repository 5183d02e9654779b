"""Plays a recording again and compares every decision."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from caravan_scheduler import recovery
from caravan_scheduler.actions import Left
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_studio.recording.events import Join
from caravan_studio.recording.lines import CallLine, RecordingError, RecordingFile, SchedulerLine, read_config
from caravan_studio.recording.names import PlayedNames
from caravan_studio.recording.read_events import EventReader
from caravan_studio.recording.write_actions import Plain, write_actions

if TYPE_CHECKING:
    from caravan_scheduler.config import SchedulerConfig

# A shard with more sequences than this is not one.
_MOST_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True)
class Difference:
    """A decision that is another one. None: there is none. ``place``: which of the call's decisions it is, from 0."""

    place: int
    recorded: Plain | str | None
    played: Plain | str | None


@dataclass(frozen=True, slots=True)
class Played:
    """A call of a scheduler that was played: ``number`` counts from 1."""

    number: int
    call: CallLine
    decisions: list[Plain]
    differences: list[Difference]


class Player:
    """The schedulers of a recording."""

    def __init__(self) -> None:
        self.models: dict[int, str] = {}
        self.configs: dict[int, SchedulerConfig] = {}
        self.schedulers: dict[int, Scheduler] = {}
        self.names: defaultdict[int, PlayedNames] = defaultdict(PlayedNames)
        self._readers: dict[int, EventReader] = {}
        # Requests that have left a scheduler, by number.
        self._left: dict[int, Sequence] = {}

    def begin(self, line: SchedulerLine) -> None:
        """Begin a scheduler. Raises RecordingError."""
        try:
            config = read_config(line.config)
            scheduler = Scheduler(config)
        except (msgspec.ValidationError, TypeError) as error:
            raise RecordingError(f"the configuration of a scheduler: {error}") from error
        self.models[line.id], self.configs[line.id] = line.model, config
        self.schedulers[line.id] = scheduler
        self._readers[line.id] = EventReader(self.names[line.id], scheduler, self._take)

    def _take(self, requests: list[int]) -> tuple[Sequence, ...]:
        try:
            return tuple(self._left.pop(request) for request in requests)
        except KeyError as missing:
            raise RecordingError(f"the request {missing} has left no scheduler") from missing

    def play(self, number: int, call: CallLine) -> Played:
        """Let the scheduler hear what it heard, and compare what it decides. Raises RecordingError."""
        scheduler, reader = self.schedulers.get(call.scheduler), self._readers.get(call.scheduler)
        if scheduler is None or reader is None:
            raise RecordingError(f"no line begins the scheduler {call.scheduler}")
        for event in call.events:
            if isinstance(event, Join) and event.limits.max_sequences > _MOST_SEQUENCES:
                raise RecordingError("a shard has too many sequences")
        try:
            events = [reader.read(event) for event in call.events]
        except (LookupError, ValueError, TypeError, OverflowError) as error:
            raise RecordingError(f"call {number}: {type(error).__name__}: {error}") from error
        actions = recovery.handle(scheduler, events, call.at)
        for action in actions:
            if isinstance(action, Left):
                self._left |= {sequence.request_id: sequence for sequence in action.sequences}
        names = self.names[call.scheduler]
        decisions = write_actions(actions, names)
        names.forget_keys(scheduler)
        return Played(number, call, decisions, differences_between(call.actions, decisions))


def differences_between(recorded: list[Plain], played: list[Plain]) -> list[Difference]:
    """Return where two lists of decisions differ."""
    if recorded == played:
        return []
    longest = max(len(recorded), len(played))
    pairs = [(_at(recorded, place), _at(played, place)) for place in range(longest)]
    return [Difference(place, was, now) for place, (was, now) in enumerate(pairs) if was != now]


def _at(decisions: list[Plain], place: int) -> Plain | None:
    return decisions[place] if place < len(decisions) else None


def play(recording: RecordingFile, player: Player) -> Iterator[Played]:
    """Yield each call of a recording. Raises RecordingError, OSError."""
    for told in recording.told():
        player.names[told.scheduler].foretell(told)
    number = 0
    for line in recording.lines():
        if line.scheduler is not None:
            player.begin(line.scheduler)
        elif line.call is not None:
            number += 1
            yield player.play(number, line.call)
