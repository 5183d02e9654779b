"""A shard as the contract describes it, without model, process or clock. It holds the scheduler to the rules."""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Load,
    Prefill,
    Row,
    Save,
    SetLayout,
)
from caravan_proto.messages.limits import LayoutLimits
from caravan_proto.messages.results import DraftCount, DraftSource, FinishReason, LayoutSet, StepOutcome
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_scheduler.events import CommandEnded, Event, ShardLimits, Stepped
from caravan_testing.model_media import tokens_of
from caravan_testing.model_outputs import NO_LOGPROB, VOCABULARY_SIZE, next_logprobs, next_token, prompt_logprobs_of
from caravan_testing.model_runs import Held, HeldCells, Run, Runs, ended_parameters


def check_chunk(cells: HeldCells, chunk: Chunk, taken_over: set[int]) -> None:
    """Fail if a chunk may not come now. ``taken_over``: the ids whose sequences this step ends and begins anew."""
    assert chunk.sequence_id < cells.limits.max_sequences
    assert chunk.token_ids, "an empty chunk"
    cells.check_spans(chunk)
    if chunk.setup is None:
        held = cells.sequences[chunk.sequence_id]
        assert chunk.start == len(held.tokens)
        assert not held.pending
        assert not held.ended
        return
    if chunk.copy is None:
        assert chunk.sequence_id not in cells.sequences, f"sequence {chunk.sequence_id} exists"
        assert chunk.start == 0
        return
    assert chunk.start == chunk.copy.length
    if chunk.copy.source_id != chunk.sequence_id:
        assert chunk.sequence_id not in cells.sequences, f"sequence {chunk.sequence_id} exists"
        assert chunk.copy.source_id not in taken_over, "copied from one that is taken over"


def new_of_chunk(cells: HeldCells, chunk: Chunk) -> Held:
    """Return the sequence that a first chunk begins, without the chunk."""
    assert chunk.setup is not None
    if chunk.copy is None:
        return Held(chunk.setup)
    return cells.copied(chunk.copy, chunk.sequence_id, chunk.setup)


def new_of_row(cells: HeldCells, row: Row, taken_over: set[int]) -> Held:
    """Return the sequence that a row begins, without the row."""
    assert row.sequence_id < cells.limits.max_sequences
    setup = ended_parameters(row.adapter)
    if row.copy is None:
        assert row.sequence_id not in cells.sequences, f"sequence {row.sequence_id} exists"
        return Held(setup, ended=True)
    if row.copy.source_id != row.sequence_id:
        assert row.sequence_id not in cells.sequences, f"sequence {row.sequence_id} exists"
        assert row.copy.source_id not in taken_over, "copied from one that is taken over"
    held = cells.copied(row.copy, row.sequence_id, setup)
    held.ended = True
    return held


def logprobs_of_chunk(cells: HeldCells, chunk: Chunk) -> tuple[int, tuple[PromptToken, ...]]:
    """Return the id of a chunk's sequence, and the logprobs of the chunk's tokens."""
    assert len(chunk.token_ids) <= cells.limits.max_prompt_logprob_tokens
    held = cells.sequences[chunk.sequence_id]
    prompt = [*held.tokens, *tokens_of(chunk)][: held.setup.prompt_length]
    logprobs = prompt_logprobs_of(prompt, held.setup.adapter)
    found = logprobs[chunk.start : chunk.start + len(chunk.token_ids)]
    return chunk.sequence_id, found if chunk.copy is None else (NO_LOGPROB, *found[1:])


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What a step carries. ``pairs``: the sum over its prompt tokens of the tokens before their chunk."""

    prompt_tokens: int = 0
    pairs: int = 0
    decodes: int = 0


def _flat_seconds(load: StepLoad) -> float:
    return 0.005 + 0.001 * (load.prompt_tokens + load.decodes)


class ModelShard:
    """Carries out commands one step per ``advance``; every breach of the contract is an AssertionError.

    ``step_seconds`` returns the duration of a step.
    """

    def __init__(
        self, name: str, limits: ShardLimits, step_seconds: Callable[[StepLoad], float] = _flat_seconds
    ) -> None:
        self.name = name
        self._cells = HeldCells(limits)
        self._runs = Runs(name, self._cells)
        self.commands: deque[Command] = deque()
        self.fail_next_step: StepOutcome | None = None
        self.refuse_next_save = False
        self.break_next_load = False
        self.lose_next_moved = False
        self.refuse_next_layout = False
        # Shards of earlier versions give each sequence cells of its own when they change the layout.
        self.shares_beginnings = True
        # Media of which the embeddings are there, least recently used first; at most so many.
        self.encoded: OrderedDict[bytes, None] = OrderedDict()
        self.most_encoded = 100
        self._missing: tuple[bytes, ...] = ()
        self._step_seconds = step_seconds
        self._steps_of_current = 0

    @property
    def limits(self) -> ShardLimits:
        return self._cells.limits

    @property
    def layout(self) -> LayoutLimits:
        return self._cells.layout

    @property
    def held(self) -> dict[int, Held]:
        return self._cells.sequences

    @property
    def runs(self) -> dict[bytes, Run]:
        return self._runs.by_key

    @property
    def atomic(self) -> bool:
        """Whether no span of media may be cut."""
        return self._cells.atomic

    @atomic.setter
    def atomic(self, value: bool) -> None:
        self._cells.atomic = value

    @property
    def used_cells(self) -> int:
        return self._cells.used

    def send(self, command: Command) -> None:
        assert len(self.commands) < 2, "a third command was sent"
        assert not self.commands or isinstance(self.commands[0], Decode), "sent over one that cannot yield"
        self.commands.append(command)

    def advance(self) -> list[Event]:
        """Run one step of the command whose turn it is, and the end of commands that are over."""
        if not self.commands:
            return []
        command = self.commands[0]
        if self._steps_of_current == 0:
            self._begin(command)
        match command:
            case Prefill():
                return [self._prefill(command), self._end()]
            case Evaluate():
                return [self._evaluate(command), self._end()]
            case FilterBatch():
                assert set(command.keep) <= set(self.held), "unknown sequence kept"
                for key in set(self.held) - set(command.keep):
                    del self.held[key]
                return [self._end()]
            case Decode():
                return self._decode(command)
            case Save():
                refused, self.refuse_next_save = self.refuse_next_save, False
                return [self._runs.save(command, refused=refused), self._end()]
            case Load():
                breaks, self.break_next_load = self.break_next_load, False
                return [self._runs.load(command, breaks=breaks), self._end()]
            case SetLayout():
                return [self._set_layout(command), self._end()]

    def _end(self) -> CommandEnded:
        self._steps_of_current = 0
        return CommandEnded(self.name, self.commands.popleft().command_id)

    def _begin(self, command: Command) -> None:
        for sequence_id in command.header.release:
            assert sequence_id in self.held, f"released {sequence_id}, which is not held"
            del self.held[sequence_id]
        for sequence_id, length in command.header.park:
            held = self.held[sequence_id]
            assert not self.layout.whole_only or length == len(held.cells)
            held.cut(length)
            held.ended = True
        for key in command.header.drop_runs:
            self._runs.drop(key)
        for key in command.header.spill_runs:
            self._runs.spill(key)
        assert self.memory_used <= self.limits.memory_bytes

    def _stepped(
        self,
        command: Command,
        rows: list[tuple[int, GeneratedToken]],
        load: StepLoad,
        prompt_logprobs: tuple[tuple[int, tuple[PromptToken, ...]], ...] = (),
        drafts: tuple[tuple[int, DraftCount], ...] = (),
    ) -> Stepped:
        outcome, self.fail_next_step = self.fail_next_step or StepOutcome.OK, None
        missing, self._missing = self._missing, ()
        assert self.used_cells <= self.layout.cells, f"{self.used_cells} cells of {self.layout.cells}"
        return Stepped(
            shard=self.name,
            command_id=command.command_id,
            outcome=outcome,
            tokens=tuple(rows),
            seconds=self._step_seconds(load),
            prompt_logprobs=prompt_logprobs,
            drafts=drafts,
            missing_media=missing,
        )

    def encode(self, media_id: bytes) -> None:
        """Keep the embeddings of a medium, in place of those that were used least recently if there are too many."""
        self.encoded[media_id] = None
        self.encoded.move_to_end(media_id)
        while len(self.encoded) > self.most_encoded:
            self.encoded.popitem(last=False)

    def _lacks_media(self, parts: Sequence[Chunk] | Sequence[Row]) -> bool:
        """Whether the step fails because media of ``parts`` are not encoded."""
        wanted = dict.fromkeys(span.media_id for part in parts for span in part.media)
        self._missing = tuple(media_id for media_id in wanted if media_id not in self.encoded)
        if self._missing and self.fail_next_step is None:
            self.fail_next_step = StepOutcome.MEDIA_MISSING
        for media_id in wanted:
            if media_id in self.encoded:
                self.encoded.move_to_end(media_id)
        return bool(self._missing)

    def _fails(self, held: Mapping[int, Held], tokens: int) -> bool:
        """Whether the step fails, if only because ``tokens`` more have no room beside ``held``."""
        if self.fail_next_step is None and self._cells.count(held.values()) + tokens > self.layout.cells:
            self.fail_next_step = StepOutcome.NO_KV
        return self.fail_next_step is not None

    def _prefill(self, command: Prefill) -> Stepped:
        load = StepLoad(
            prompt_tokens=sum(len(chunk.token_ids) for chunk in command.chunks),
            pairs=sum(len(chunk.token_ids) * chunk.start for chunk in command.chunks),
            decodes=len(command.ride),
        )
        assert command.chunks
        tokens = load.prompt_tokens + load.decodes
        assert tokens <= self.limits.max_batch_tokens, f"{tokens} tokens in one step"
        ids = [chunk.sequence_id for chunk in command.chunks] + list(command.ride)
        assert len(ids) == len(set(ids)), f"a sequence twice in one step: {ids}"
        taken_over = {chunk.sequence_id for chunk in command.chunks if chunk.copy is not None} & set(self.held)
        for chunk in command.chunks:
            check_chunk(self._cells, chunk, taken_over)
        new = {
            chunk.sequence_id: new_of_chunk(self._cells, chunk) for chunk in command.chunks if chunk.setup is not None
        }
        riders = sum(not self.held[key].ended for key in command.ride)
        if self._lacks_media(command.chunks) or self._fails(self.held | new, load.prompt_tokens + riders):
            self._cells.cut_back(command.chunks, taken_over)
            return self._stepped(command, [], load)
        self.held.update(new)
        self._cells.check_adapter(ids)
        logprobs = tuple(
            logprobs_of_chunk(self._cells, chunk)
            for chunk in command.chunks
            if self.held[chunk.sequence_id].setup.prompt_logprobs
        )
        rows = [row for sequence_id in command.ride if (row := self._step(sequence_id)) is not None]
        for chunk in command.chunks:
            held = self.held[chunk.sequence_id]
            held.tokens.extend(tokens_of(chunk))
            held.cells.extend(self._cells.new(len(chunk.token_ids)))
            assert len(held.cells) <= self.layout.cells_per_sequence
            if chunk.last:
                rows.append(self._sample(chunk.sequence_id, held))
        return self._stepped(command, rows, load, logprobs)

    def _evaluate(self, command: Evaluate) -> Stepped:
        load = StepLoad(prompt_tokens=sum(len(row.token_ids) for row in command.rows))
        assert command.rows
        assert load.prompt_tokens <= self.limits.max_batch_tokens, f"{load.prompt_tokens} tokens in one step"
        ids = [row.sequence_id for row in command.rows]
        assert len(ids) == len(set(ids)), f"a sequence twice in one step: {ids}"
        taken_over = {row.sequence_id for row in command.rows if row.copy is not None} & set(self.held)
        new = {
            row.sequence_id: new_of_row(self._cells, row, taken_over)
            for row in command.rows
            if row.takes_over or row.sequence_id not in self.held
        }
        if self._lacks_media(command.rows) or self._fails(self.held | new, load.prompt_tokens):
            self._cells.cut_back(command.rows, taken_over)
            return self._stepped(command, [], load)
        self.held.update(new)
        self._cells.check_adapter(ids)
        found = []
        for row in command.rows:
            held = self.held[row.sequence_id]
            assert held.ended, "the row of a sequence that has not ended is kept"
            assert row.token_ids
            self._cells.check_spans(row)
            assert row.start == len(held.cells) == len(held.tokens)
            held.tokens.extend(tokens_of(row))
            held.cells.extend(self._cells.new(len(row.token_ids)))
            assert len(held.cells) <= self.layout.cells_per_sequence
            if row.top_n_tokens:
                logprobs = next_logprobs(held.tokens, row.adapter)
                top = sorted(range(VOCABULARY_SIZE), key=lambda token: -logprobs[token])[: row.top_n_tokens]
                found.append((row.sequence_id, tuple(Alternative(one, b"x", False, logprobs[one]) for one in top)))
        return replace(self._stepped(command, [], load), evaluations=tuple(found))

    def _decode(self, command: Decode) -> list[Event]:
        assert command.sequence_ids
        assert command.max_steps > 0
        self._cells.check_adapter(command.sequence_ids)
        running = sum(not self.held[key].ended for key in command.sequence_ids)
        if self._fails(self.held, running):
            return [self._stepped(command, [], StepLoad(decodes=1)), self._end()]
        drafts = self._drafts(command, running)
        rows, counts = [], []
        for sequence_id in command.sequence_ids:
            drafted = drafts.get(sequence_id, 0)
            accepted = self._accepted(sequence_id, drafted)
            got = self._steps(sequence_id, 1 + accepted)
            rows += got
            if drafted:
                accepted = min(accepted, len(got))
                counts.append((sequence_id, DraftCount(DraftSource.CONTEXT, drafted, accepted)))
        self._steps_of_current += 1 + max((count.accepted for _, count in counts), default=0)
        load = StepLoad(decodes=running + sum(drafts.values()))
        events: list[Event] = [self._stepped(command, rows, load, drafts=tuple(counts))] if rows else []
        if not rows or len(self.commands) > 1 or self._steps_of_current >= command.max_steps:
            events.append(self._end())
        return events

    def _drafts(self, command: Decode, running: int) -> dict[int, int]:
        """Return how many draft tokens each sequence has in the next step, all that it may have."""
        assert command.max_draft_tokens <= self.limits.max_draft_tokens
        assert running + command.max_draft_tokens <= self.limits.max_batch_tokens
        left, drafts = command.max_draft_tokens, {}
        for sequence_id in command.sequence_ids:
            held = self.held[sequence_id]
            if not held.ended:
                drafts[sequence_id] = max(
                    0,
                    min(
                        left,
                        held.setup.max_draft_tokens,
                        self.layout.rollback_tokens if self.layout.whole_only else left,
                        held.setup.max_length - len(held.tokens) - 1,
                        command.max_steps - self._steps_of_current - 1,
                        self.layout.cells_per_sequence - len(held.cells) - 1,
                    ),
                )
                left -= drafts[sequence_id]
        if drafts and self.layout.shares_cells:
            room = self.layout.cells - self.used_cells
            assert not any(drafts.values()) or running + sum(drafts.values()) <= room, "no room for drafts"
        return drafts

    def _accepted(self, sequence_id: int, drafted: int) -> int:
        """Return how many draft tokens are right, if the sequence gets so many."""
        return sum(self.held[sequence_id].tokens) % (drafted + 1)

    def _steps(self, sequence_id: int, most: int) -> list[tuple[int, GeneratedToken]]:
        """Return the next ``most`` tokens of a sequence, fewer if it ends."""
        rows: list[tuple[int, GeneratedToken]] = []
        while len(rows) < most and (row := self._step(sequence_id)) is not None:
            rows.append(row)
        return rows

    def _step(self, sequence_id: int) -> tuple[int, GeneratedToken] | None:
        held = self.held[sequence_id]
        assert held.ended or held.pending, f"sequence {sequence_id} is not prefilled"
        if held.ended:
            return None
        held.cells += self._cells.new(1)
        return self._sample(sequence_id, held)

    def _sample(self, sequence_id: int, held: Held) -> tuple[int, GeneratedToken]:
        token = next_token(held.tokens, held.setup.adapter)
        held.tokens.append(token)
        finish = None
        if token == 0 and not held.setup.ignore_eos:
            finish = FinishReason.EOS_TOKEN
        elif len(held.tokens) >= held.setup.max_length:
            finish = FinishReason.LENGTH
        held.ended = finish is not None
        return sequence_id, GeneratedToken(token, b"x", False, None, (), finish)

    def adopt(self, run: Run | None) -> bool:
        """Keep a run of another shard; False if there is none or no room for it."""
        return self._runs.adopt(run)

    @property
    def memory_used(self) -> int:
        return self._runs.memory_used

    def _set_layout(self, command: SetLayout) -> LayoutSet:
        other = self.limits.other_layout
        assert other is not None
        assert other.layout is command.layout
        if self.refuse_next_layout:
            self.refuse_next_layout = False
            self._cells.move(self.layout, (), shares=self.shares_beginnings)
            self._cells.limits = replace(self.limits, other_layout=None)
            layout = self.layout
            return LayoutSet(
                shard=self.name,
                command_id=command.command_id,
                layout=layout,
                lost=(),
                seconds=0.2,
                shares_beginnings=self.shares_beginnings,
            )
        lost = tuple(self.held)[:1] if self.lose_next_moved else ()
        self.lose_next_moved = False
        self._cells.move(other, lost, shares=self.shares_beginnings)
        return LayoutSet(
            shard=self.name,
            command_id=command.command_id,
            layout=other,
            lost=lost,
            seconds=0.2,
            shares_beginnings=self.shares_beginnings,
        )
