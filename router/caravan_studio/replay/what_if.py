"""Plays the demand of a recording in virtual time: as it was, or with other flags or shards."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

from caravan_proto.messages.commands import Chunk, Command, Prefill, SetLayout
from caravan_proto.messages.results import LayoutSet
from caravan_scheduler.actions import Action, Deliver, Fail
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Cancelled, CommandEnded, Event, ShardLimits, Stepped, Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.replay.demand import Asked, Demand, ShardChange
from caravan_studio.replay.outcome import Figures, Outcome
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member

# A change of the layout.
_LAYOUT_S = 0.05

_TICK_S = 0.5
# What is not over then will not be.
_MOST_EXTRA_S = 3600.0

# Returns how many tokens the output will have of the request that a sequence id of a command stands for.
OutputOf = Callable[[str, int, int], int]


class RecordedShard(PlayedShard):
    """As much passes between two steps as there. Nothing is drafted."""

    def __init__(self, name: str, limits: ShardLimits, demand: Demand, output_of: OutputOf) -> None:
        super().__init__(name, demand.times_of(name))
        self._limits = limits
        self._overhead_s = demand.overhead_s
        self._encode_s = demand.encode_s
        self._output_of = output_of

    def encode_s(self, media_id: bytes) -> float:
        """Return how long it took to encode a medium."""
        return self._encode_s(media_id)

    def send(self, command: Command) -> None:
        """Take a command. Outputs end where they ended when they were recorded."""
        if isinstance(command, Prefill):
            command = replace(command, chunks=[self._ending(command, chunk) for chunk in command.chunks])
        super().send(command)

    def _ending(self, command: Prefill, chunk: Chunk) -> Chunk:
        if chunk.setup is None:
            return chunk
        output = self._output_of(self.name, command.command_id, chunk.sequence_id)
        length = min(chunk.setup.max_length, chunk.setup.prompt_length + output)
        return replace(chunk, setup=replace(chunk.setup, max_length=length))

    def advance(self) -> tuple[float, list[Event]]:
        """Run one step. Return when it is over, and what the scheduler hears of it."""
        command = self._commands[0]
        if isinstance(command, SetLayout):
            return _LAYOUT_S, self._set_layout(command)
        seconds, events = super().advance()
        return seconds + self._overhead_s * any(isinstance(event, Stepped) for event in events), events

    def _set_layout(self, command: SetLayout) -> list[Event]:
        limits = self._limits
        assert limits.other_layout is not None, "the cache has one layout"
        self._limits = replace(limits, layout=limits.other_layout, other_layout=limits.layout)
        self._commands.popleft()
        reply = LayoutSet(
            shard=self.name,
            command_id=command.command_id,
            layout=self._limits.layout,
            lost=(),
            seconds=_LAYOUT_S,
            shares_beginnings=True,
        )
        return [reply, CommandEnded(self.name, command.command_id)]


@dataclass(frozen=True, slots=True)
class Change:
    """``shards``: how many more shards, like the first one, or fewer, of those that joined last."""

    config: SchedulerConfig
    shards: int = 0


class WhatIf:
    """Plays ``demand`` under a ``change``."""

    def __init__(self, demand: Demand, change: Change) -> None:
        self._demand = demand
        self._outcome = Outcome()
        self._scheduler = Scheduler(change.config)
        self._fleet = Fleet([self._scheduler], [], self._hear)
        self._open: set[int] = set()
        # What happens when, in order.
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        for shard in _shards(demand, change.shards):
            self._plan(shard.at_s, self._shard_step(shard))
        for asked in demand.asked.values():
            self._plan(asked.request.arrived_s, self._submission(asked))
            if asked.left_s is not None:
                self._plan(asked.left_s, self._departure(asked.request.request_id))

    def _plan(self, at_s: float, step: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, len(self._agenda), step))

    def _shard_step(self, change: ShardChange) -> Callable[[], None]:
        def step() -> None:
            if change.shard in self._fleet.names and (change.limits is not None or not change.drains):
                self._fleet.lose(change.shard)
            if change.limits is not None:
                shard = RecordedShard(change.shard, change.limits, self._demand, self._output_of)
                self._fleet.join(Member(shard, change.limits, 0))
            elif change.drains and change.shard in self._fleet.names:
                self._fleet.drain(change.shard)

        return step

    def _output_of(self, shard: str, command_id: int, sequence_id: int) -> int:
        command = self._scheduler.shards[shard].commands.find(command_id)
        assert command is not None, "it was just sent"
        return self._demand.output_of(command.residents[sequence_id].request_id)

    def _submission(self, asked: Asked) -> Callable[[], None]:
        def step() -> None:
            request = asked.request
            # Drafts and logprobs of prompts are not played.
            spec = replace(request.spec, max_draft_tokens=0, prompt_logprobs=False)
            self._open.add(request.request_id)
            self._outcome.ask(request.request_id, request.arrived_s)
            self._fleet.handle([Submitted(replace(request, spec=spec))])

        return step

    def _departure(self, request_id: int) -> Callable[[], None]:
        def step() -> None:
            if request_id in self._open:
                self._open.discard(request_id)
                self._fleet.handle([Cancelled(request_id)])

        return step

    def _hear(self, at_s: float, action: Action) -> None:
        if isinstance(action, Deliver):
            self._outcome.hear(action.request_id, len(action.tokens), at_s)
            if action.tokens and action.tokens[-1].finish is not None:
                self._open.discard(action.request_id)
        elif isinstance(action, Fail):
            self._outcome.fail(action.request_id)
            self._open.discard(action.request_id)

    def run(self) -> Figures:
        """Play until all requests have ended. Return what clients saw."""
        ticked_s = self._agenda[0][0] if self._agenda else 0.0
        ends_s = self._demand.until_s + _MOST_EXTRA_S
        while (self._agenda or self._open) and ticked_s < ends_s:
            ticked_s += _TICK_S
            while self._agenda and self._agenda[0][0] <= ticked_s:
                at_s, _, step = heapq.heappop(self._agenda)
                self._fleet.run_until(max(at_s, self._fleet.now_s))
                step()
            self._fleet.run_until(ticked_s)
            self._fleet.tick()
        return self._outcome.figures()


def _shards(demand: Demand, more: int) -> list[ShardChange]:
    """Return what happens to shards, with some more or fewer."""
    joins = [change for change in demand.changes if change.limits is not None]
    names = list(dict.fromkeys(change.shard for change in joins))
    if more < 0:
        kept = set(names[:more])
        return [change for change in demand.changes if change.shard in kept]
    extra = [replace(joins[0], shard=f"more-{number}") for number in range(1, more + 1)] if joins else []
    return [*demand.changes, *extra]
