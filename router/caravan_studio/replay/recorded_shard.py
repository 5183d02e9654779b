"""A shard in virtual time that takes as long as one that was recorded, and whose outputs end where they ended."""

from collections.abc import Callable
from dataclasses import replace

from caravan_proto.messages.commands import Chunk, Command, Prefill, SetLayout
from caravan_proto.messages.results import LayoutSet
from caravan_scheduler.events import CommandEnded, Event, ShardLimits, Stepped
from caravan_studio.replay.demand import Demand
from caravan_studio.replay.played_shard import PlayedShard

# A change of the layout.
_LAYOUT_S = 0.05

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
        )
        return [reply, CommandEnded(self.name, command.command_id)]
