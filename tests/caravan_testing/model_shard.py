"""A shard as the contract describes it, without a model, a process or time: it holds the scheduler to the rules."""

from collections import deque
from dataclasses import dataclass, field

from caravan_router.scheduling.actions import Command, Decode, FilterBatch, Prefill
from caravan_router.scheduling.events import CommandEnded, Event, Row, ShardLimits, StepOutcome, Stepped
from caravan_router.scheduling.params import FinishReason
from caravan_router.scheduling.sequence import Request
from caravan_router.scheduling.tokens import GeneratedToken

_VOCABULARY = 97


def next_token(tokens: list[int]) -> int:
    """The toy model: depends on every token and its place."""
    state = 7
    for position, token in enumerate(tokens):
        state = (state * 31 + token * 17 + position) % 1_000_003
    return state % _VOCABULARY


def expected_output(request: Request) -> list[int]:
    """What ``request`` must yield, however it was scheduled. Token 0 ends it early unless ignored."""
    tokens = list(request.prompt)
    while len(tokens) < request.max_length:
        tokens.append(next_token(tokens))
        if tokens[-1] == 0 and not request.stopping.ignore_eos:
            break
    return tokens[len(request.prompt) :]


@dataclass
class _Held:
    request: Request
    tokens: list[int] = field(default_factory=list)
    # The last token is sampled and not yet in a cell.
    pending: bool = False
    ended: bool = False

    @property
    def cells(self) -> int:
        return len(self.tokens) - self.pending


class ModelShard:
    """Carries out commands one pass per ``advance``; every breach of the contract is an AssertionError."""

    def __init__(self, name: str, limits: ShardLimits) -> None:
        self.name = name
        self.limits = limits
        self.held: dict[int, _Held] = {}
        self.commands: deque[Command] = deque()
        self.fail_next_pass: StepOutcome | None = None
        self.max_pass_tokens = 0
        self._steps_of_current = 0

    @property
    def cells(self) -> int:
        return sum(held.cells for held in self.held.values())

    def send(self, command: Command) -> None:
        assert len(self.commands) < 2, "a third command was sent"
        assert not self.commands or isinstance(self.commands[0], Decode), "sent over one that cannot yield"
        self.commands.append(command)

    def advance(self) -> list[Event]:
        """One pass of the command whose turn it is, and the end of commands that are over."""
        if not self.commands:
            return []
        command = self.commands[0]
        if self._steps_of_current == 0:
            self._begin(command)
        match command:
            case Prefill():
                return [self._prefill(command), self._end()]
            case FilterBatch():
                self.held = {key: held for key, held in self.held.items() if key in command.keep}
                return [self._end()]
            case Decode():
                return self._decode(command)

    def _end(self) -> CommandEnded:
        self._steps_of_current = 0
        return CommandEnded(self.name, self.commands.popleft().command_id)

    def _begin(self, command: Command) -> None:
        if isinstance(command, FilterBatch):
            assert set(command.keep) <= set(self.held), "unknown sequence kept"
            return
        for sequence_id in command.release:
            assert sequence_id in self.held, f"released {sequence_id}, which is not held"
            del self.held[sequence_id]

    def _stepped(self, command: Command, rows: list[Row], tokens: int) -> Stepped:
        outcome, self.fail_next_pass = self.fail_next_pass or StepOutcome.OK, None
        assert self.cells <= self.limits.cells, f"{self.cells} cells of {self.limits.cells}"
        return Stepped(
            shard=self.name,
            command_id=command.command_id,
            outcome=outcome,
            rows=tuple(rows),
            seconds=0.005 + 0.001 * tokens,
        )

    def _prefill(self, command: Prefill) -> Stepped:
        tokens = sum(len(chunk.token_ids) for chunk in command.chunks) + len(command.ride)
        assert command.chunks
        assert tokens <= self.limits.max_batch_tokens, f"{tokens} tokens in one pass"
        ids = [chunk.sequence_id for chunk in command.chunks] + list(command.ride)
        assert len(ids) == len(set(ids)), f"a sequence twice in one pass: {ids}"
        for chunk in command.chunks:
            assert chunk.sequence_id < self.limits.max_sequences
            assert chunk.token_ids, "an empty chunk"
            if chunk.setup is not None:
                assert chunk.sequence_id not in self.held, f"sequence {chunk.sequence_id} exists"
                assert chunk.start == 0
            else:
                held = self.held[chunk.sequence_id]
                assert chunk.start == len(held.tokens)
                assert not held.pending
        if self.fail_next_pass is not None:
            return self._stepped(command, [], tokens)
        rows = [row for sequence_id in command.ride if (row := self._step(sequence_id)) is not None]
        for chunk in command.chunks:
            if chunk.setup is not None:
                self.held[chunk.sequence_id] = _Held(chunk.setup)
            held = self.held[chunk.sequence_id]
            held.tokens.extend(chunk.token_ids)
            assert held.cells <= self.limits.cells_per_sequence
            if chunk.last:
                rows.append(self._sample(chunk.sequence_id, held))
        self.max_pass_tokens = max(self.max_pass_tokens, tokens)
        return self._stepped(command, rows, tokens)

    def _decode(self, command: Decode) -> list[Event]:
        assert command.sequence_ids
        assert command.max_steps > 0
        if self.fail_next_pass is not None:
            return [self._stepped(command, [], 1), self._end()]
        rows = [row for sequence_id in command.sequence_ids if (row := self._step(sequence_id)) is not None]
        self._steps_of_current += 1
        events: list[Event] = [self._stepped(command, rows, len(rows))] if rows else []
        if not rows or len(self.commands) > 1 or self._steps_of_current >= command.max_steps:
            events.append(self._end())
        return events

    def _step(self, sequence_id: int) -> Row | None:
        held = self.held[sequence_id]
        assert held.ended or held.pending, f"sequence {sequence_id} is not prefilled"
        return None if held.ended else self._sample(sequence_id, held)

    def _sample(self, sequence_id: int, held: _Held) -> Row:
        token = next_token(held.tokens)
        held.tokens.append(token)
        held.pending = True
        finish = None
        if token == 0 and not held.request.stopping.ignore_eos:
            finish = FinishReason.EOS_TOKEN
        elif len(held.tokens) >= held.request.max_length:
            finish = FinishReason.LENGTH
        held.ended = finish is not None
        return Row(sequence_id, GeneratedToken(token, b"x", False, None, (), finish))
