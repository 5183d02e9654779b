"""Schedulers and the shards that they drive, in the order of a virtual clock."""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from caravan_proto.messages.commands import Decode, FilterBatch, Load, Prefill, Save, SetLayout
from caravan_scheduler.actions import Action, Drained, Encode
from caravan_scheduler.events import (
    CommandEnded,
    Encoded,
    EncodeOutcome,
    Event,
    ShardDraining,
    ShardJoined,
    ShardLimits,
    ShardLost,
    Stepped,
    Tick,
)
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.played_shard import PlayedShard


@dataclass(frozen=True, slots=True)
class Member:
    """A shard of the fleet. ``scheduler``: the place of its scheduler among those of the fleet."""

    shard: PlayedShard
    limits: ShardLimits
    scheduler: int


class Fleet:
    """Plays all shards. ``listener`` receives the time and the actions of schedulers that are not for a shard.

    ``cpu_s`` is the processor time that schedulers took, ``steps`` the number of steps of all shards.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        members: Iterable[Member],
        listener: Callable[[float, Action], None],
    ) -> None:
        self._schedulers = schedulers
        self._members = {member.shard.name: member for member in members}
        self._listener = listener
        # When each busy shard has done its step or encoded a medium, and what it then reports. Numbers keep the order.
        self._due: list[tuple[float, str, int, list[Event]]] = []
        self._numbers = itertools.count()
        self._stepping: set[str] = set()
        # When shards will have encoded the last of the media that they were given.
        self._encoded_s: dict[str, float] = {}
        self.now_s = 0.0
        self.cpu_s = 0.0
        self.steps = 0

    def begin(self) -> None:
        """Let the shards join."""
        for member in self._members.values():
            self._announce(member)

    def join(self, member: Member) -> None:
        """Let one more shard join."""
        self._members[member.shard.name] = member
        self._announce(member)

    def _announce(self, member: Member) -> None:
        self.handle([ShardJoined(member.shard.name, member.limits)], member.scheduler)

    def drain(self, name: str) -> None:
        """Let a shard drain. It leaves when nothing of it is needed any more."""
        self.handle([ShardDraining(name)], self._members[name].scheduler)

    def lose(self, name: str) -> None:
        """Lose a shard with all it holds."""
        scheduler = self._members.pop(name).scheduler
        self._due = [due for due in self._due if due[1] != name]
        heapq.heapify(self._due)
        self._stepping.discard(name)
        self._encoded_s.pop(name, None)
        self.handle([ShardLost(name)], scheduler)

    @property
    def names(self) -> list[str]:
        """The shards that have not left, in the order in which they joined."""
        return list(self._members)

    def run_until(self, at_s: float) -> None:
        """Play all steps that end by ``at_s``."""
        while self._due and self._due[0][0] <= at_s:
            self.step()
        self.now_s = at_s

    @property
    def next_s(self) -> float:
        """When the step ends that ends next; infinite if no shard has anything to do."""
        return self._due[0][0] if self._due else math.inf

    def step(self) -> None:
        """Play the step that ends next."""
        self.now_s, name, _, events = heapq.heappop(self._due)
        if not isinstance(events[0], Encoded):
            self._stepping.remove(name)
        self.steps += any(isinstance(event, Stepped) for event in events)
        self.handle(events, self._members[name].scheduler)

    def tick(self) -> None:
        """Let every scheduler notice the time."""
        for index in range(len(self._schedulers)):
            self.handle([Tick()], index)

    def handle(self, events: list[Event], scheduler: int = 0) -> None:
        """Let a scheduler handle ``events``, and do what it then decides."""
        began = time.process_time()
        actions = self._schedulers[scheduler].handle(events, self.now_s)
        self.cpu_s += time.process_time() - began
        for action in actions:
            if isinstance(action, Prefill | Decode | FilterBatch | Save | Load | SetLayout):
                self._members[action.shard].shard.send(action)
                self._run(action.shard)
            elif isinstance(action, Encode):
                self._encode(action)
            elif isinstance(action, Drained):
                self.lose(action.shard)
            else:
                self._listener(self.now_s, action)
        for event in events:
            if isinstance(event, CommandEnded | Stepped) and event.shard in self._members:
                self._run(event.shard)

    def _run(self, name: str) -> None:
        """Let a shard that has something to do and is doing nothing run a step."""
        shard = self._members[name].shard
        if shard.is_busy and name not in self._stepping:
            seconds, events = shard.advance()
            self._stepping.add(name)
            heapq.heappush(self._due, (self.now_s + seconds, name, next(self._numbers), events))

    def _encode(self, action: Encode) -> None:
        """Let a shard encode a medium, after those that it was given before, and beside its steps."""
        seconds = self._members[action.shard].shard.encode_s(action.media.id)
        ends_s = self._encoded_s[action.shard] = max(self.now_s, self._encoded_s.get(action.shard, 0.0)) + seconds
        events: list[Event] = [Encoded(encode_id=action.encode_id, outcome=EncodeOutcome.DONE, seconds=seconds)]
        heapq.heappush(self._due, (ends_s, action.shard, next(self._numbers), events))
