"""Plays a recording again and compares every decision."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from caravan_scheduler import recovery
from caravan_scheduler.actions import Left
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.sequence import Sequence
from caravan_studio.recording.lines import CallLine, SchedulerLine, StateLine, read_config
from caravan_studio.recording.played_media import media_number_of
from caravan_studio.recording.prefixes import PlayedKeys
from caravan_studio.recording.read_events import EventReader
from caravan_studio.recording.read_lines import RecordingError, RecordingFile
from caravan_studio.recording.read_state import StateError, StateReader
from caravan_studio.recording.write_actions import Plain, write_actions

if TYPE_CHECKING:
    from caravan_scheduler.config import SchedulerConfig

# A shard with more sequences than this is not one.
_MOST_SEQUENCES = 1 << 16


class _PlayedNames:
    """The names in a recording are those that the scheduler has when it is played again, but for keys."""

    def __init__(self, keys: PlayedKeys) -> None:
        self._keys = keys

    def token(self, token: int) -> int:
        return token

    def tokens(self, tokens: Any) -> list[int]:
        return list(tokens)

    def key(self, key: bytes) -> int:
        return self._keys.number(key)

    def medium(self, media_id: bytes) -> int:
        return media_number_of(media_id)

    def forget_key(self, key: bytes) -> None:
        self._keys.forget(key)

    def tenant(self, name: str) -> str:
        return name


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


@dataclass(frozen=True, slots=True)
class Begun:
    """The shards and the number of requests of a scheduler with which a part of a recording begins."""

    shards: dict[str, ShardLimits]
    requests: int


class Player:
    """The schedulers of a recording."""

    def __init__(self) -> None:
        self.keys = PlayedKeys()
        self._names = _PlayedNames(self.keys)
        # What the states tell of keys.
        self._told = PlayedKeys()
        self.models: dict[int, str] = {}
        self.configs: dict[int, SchedulerConfig] = {}
        self.schedulers: dict[int, Scheduler] = {}
        # What schedulers had when they began, if that is a later part of the recording.
        self.begun: dict[int, Begun] = {}
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
        self._readers[line.id] = EventReader(self.keys, scheduler, self._take)

    def continue_from(self, line: StateLine) -> None:
        """Let a scheduler that has begun know what it knew. Raises RecordingError."""
        self.keys.reserve(line.keys)
        try:
            scheduler = StateReader(line.nodes, self.keys).read()
        except StateError as error:
            raise RecordingError(f"the state of the scheduler {line.id}: {error}") from error
        StateReader(line.nodes, self._told).note_keys()
        self.keys.forget_unknown(self._told.knows)
        self.schedulers[line.id] = scheduler
        self._readers[line.id] = EventReader(self.keys, scheduler, self._take)
        limits = {name: shard.capacity.limits for name, shard in scheduler.shards.items()}
        self.begun[line.id] = Begun(limits, len(scheduler.sequences))

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
            if type(event).__name__ == "Join" and event.limits.max_sequences > _MOST_SEQUENCES:  # type: ignore[union-attr]
                raise RecordingError("a shard has too many sequences")
        actions = recovery.handle(scheduler, [reader.read(event) for event in call.events], call.at)
        for action in actions:
            if isinstance(action, Left):
                self._left |= {sequence.request_id: sequence for sequence in action.sequences}
        decisions = write_actions(actions, self._names)
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
        player.keys.foretell(told)
    number = 0
    for line in recording.lines():
        if line.scheduler is not None:
            player.begin(line.scheduler)
        elif line.state is not None:
            player.continue_from(line.state)
        elif line.call is not None:
            number += 1
            yield player.play(number, line.call)
