"""A shard that only keeps time: it answers every command as a real one would that never fails."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from caravan_proto.messages.commands import Command, Decode, FilterBatch, Load, Prefill, Save, SequenceParameters
from caravan_proto.messages.results import FinishReason, Loaded, Saved, StepOutcome
from caravan_scheduler.core.tokens import GeneratedToken
from caravan_scheduler.events import CommandEnded, Event, Stepped

# Every output is a row of this token, so that traces can contain answers before they are given.
OUTPUT_TOKEN_ID = 1234
# What a command costs that computes nothing.
_COMMAND_S = 0.001
_TOKEN = GeneratedToken(OUTPUT_TOKEN_ID, b" word", False, None, (), None)
_LAST_TOKEN = GeneratedToken(OUTPUT_TOKEN_ID, b" word", False, None, (), FinishReason.LENGTH)


class Times(Protocol):
    """How long a shard takes. Copying a cell out of the cache or back takes ``cell_s``."""

    @property
    def cell_s(self) -> float: ...

    def seconds(self, sequences: int, prompt_tokens: int = 0, pairs: int = 0) -> float:
        """Return the seconds of a step over decoding sequences and tokens of prompts.

        ``pairs``: the number of pairs of a prompt token and a token before it.
        """
        ...


class PlayedShard:
    """Answers commands without checking them; `caravan_testing.model_shard` does that, and takes longer.

    A saved cell counts as one byte.
    """

    def __init__(self, name: str, times: Times) -> None:
        self.name = name
        self.steps = 0
        self._times = times
        self._commands: deque[Command] = deque()
        self._decode_steps = 0
        # By sequence id.
        self._setups: dict[int, SequenceParameters] = {}
        self._tokens_left: dict[int, int] = {}

    def encode_s(self, media_id: bytes) -> float:
        """Return how long it takes to encode a medium."""
        return 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._commands)

    def send(self, command: Command) -> None:
        self._commands.append(command)

    def advance(self) -> tuple[float, list[Event]]:
        """Run one step. Return its seconds and what the scheduler hears of it."""
        command = self._commands[0]
        match command:
            case Prefill():
                return self._prefill(command)
            case Decode():
                return self._decode(command)
            case Save():
                return self._save(command)
            case Load():
                return self._load(command)
            case FilterBatch():
                return _COMMAND_S, [self._end()]
            case _:
                raise NotImplementedError(command)

    def _end(self) -> CommandEnded:
        self._decode_steps = 0
        return CommandEnded(self.name, self._commands.popleft().command_id)

    def _prefill(self, command: Prefill) -> tuple[float, list[Event]]:
        tokens = pairs = 0
        for chunk in command.chunks:
            if chunk.setup is not None:
                self._setups[chunk.sequence_id] = chunk.setup
            if chunk.last:  # some of what was computed may have been generated in an earlier stay
                setup = self._setups[chunk.sequence_id]
                known = chunk.start + len(chunk.token_ids)
                self._tokens_left[chunk.sequence_id] = setup.max_length - known
            tokens += len(chunk.token_ids)
            pairs += len(chunk.token_ids) * chunk.start
        sampled = self._sample([*(chunk.sequence_id for chunk in command.chunks if chunk.last), *command.ride])
        seconds = self._times.seconds(len(command.ride), tokens, pairs)
        return seconds, [self._stepped(command, sampled, seconds), self._end()]

    def _decode(self, command: Decode) -> tuple[float, list[Event]]:
        self._decode_steps += 1
        tokens = self._sample(command.sequence_ids)
        seconds = self._times.seconds(len(tokens))
        events: list[Event] = [self._stepped(command, tokens, seconds)] if tokens else []
        if not tokens or len(self._commands) > 1 or self._decode_steps >= command.max_steps:
            events.append(self._end())
        return seconds, events

    def _sample(self, ids: Iterable[int]) -> tuple[tuple[int, GeneratedToken], ...]:
        tokens = []
        for sequence_id in ids:
            left = self._tokens_left[sequence_id] = self._tokens_left[sequence_id] - 1
            if left >= 0:
                tokens.append((sequence_id, _LAST_TOKEN if left == 0 else _TOKEN))
        return tuple(tokens)

    def _stepped(self, command: Command, tokens: tuple[tuple[int, GeneratedToken], ...], seconds: float) -> Stepped:
        self.steps += 1
        return Stepped(
            shard=self.name, command_id=command.command_id, outcome=StepOutcome.OK, tokens=tokens, seconds=seconds
        )

    def _save(self, command: Save) -> tuple[float, list[Event]]:
        sizes = tuple(entry.cuts[-1][0] - entry.start for entry in command.entries)
        seconds = _COMMAND_S + self._times.cell_s * sum(sizes)
        saved = tuple(True for _ in command.entries)
        reply = Saved(shard=self.name, command_id=command.command_id, saved=saved, sizes_bytes=sizes, seconds=seconds)
        return seconds, [reply, self._end()]

    def _load(self, command: Load) -> tuple[float, list[Event]]:
        seconds = _COMMAND_S + self._times.cell_s * sum(len(entry.token_ids) for entry in command.entries)
        loaded = tuple(True for _ in command.entries)
        reply = Loaded(shard=self.name, command_id=command.command_id, loaded=loaded, bad_runs=(), seconds=seconds)
        return seconds, [reply, self._end()]
