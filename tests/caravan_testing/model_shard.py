"""A shard as the contract describes it, without model, process or clock. It holds the scheduler to the rules."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from caravan_proto.messages.commands import (
    Chunk,
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Row,
    Save,
    SequenceParameters,
    SetLayout,
)
from caravan_proto.messages.limits import LayoutLimits, Saving
from caravan_proto.messages.results import DraftCount, DraftSource, FinishReason, LayoutSet, Loaded, Saved, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_router.core.tokens import Alternative, GeneratedToken, PromptToken
from caravan_router.scheduling.events import CommandEnded, Event, SavedRun, ShardLimits, Stepped
from caravan_testing.model_outputs import (
    NO_LOGPROB,
    VOCABULARY_SIZE,
    next_logprobs,
    next_token,
    prompt_logprobs_of,
)


@dataclass(frozen=True, kw_only=True)
class StepLoad:
    """What a step carries. ``pairs``: the sum over its prompt tokens of the tokens before their chunk."""

    prompt_tokens: int = 0
    pairs: int = 0
    decodes: int = 0


def _flat_seconds(load: StepLoad) -> float:
    return 0.005 + 0.001 * (load.prompt_tokens + load.decodes)


@dataclass
class _Held:
    setup: SequenceParameters
    tokens: list[int] = field(default_factory=list)
    # A number for each cell; sequences that share a prefix have the same numbers.
    cells: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def pending(self) -> bool:
        """Whether the last token is sampled and not yet in a cell."""
        return len(self.tokens) > len(self.cells)

    def cut(self, length: int) -> None:
        assert 1 <= length <= len(self.cells), f"cut to {length} of {len(self.cells)}"
        del self.tokens[length:], self.cells[length:]


@dataclass
class _Run:
    """A saved run with all tokens up to its end, and the parameters of the sequence it is from."""

    saved: SavedRun
    setup: SequenceParameters
    tokens: list[int]


def _ended_parameters(adapter: str) -> SequenceParameters:
    """Return the parameters of a sequence that gets no tokens."""
    return SequenceParameters(sampling=SamplingParams(), prompt_length=1, max_length=2, adapter=adapter)


class ModelShard:
    """Carries out commands one step per ``advance``; every breach of the contract is an AssertionError.

    ``step_seconds`` returns the duration of a step.
    """

    def __init__(
        self, name: str, limits: ShardLimits, step_seconds: Callable[[StepLoad], float] = _flat_seconds
    ) -> None:
        self.name = name
        self.limits = limits
        self.held: dict[int, _Held] = {}
        self.runs: dict[bytes, _Run] = {}
        self.commands: deque[Command] = deque()
        self.fail_next_step: StepOutcome | None = None
        self.refuse_next_save = False
        self.break_next_load = False
        self.lose_next_moved = False
        self.refuse_next_layout = False
        self._step_seconds = step_seconds
        self._steps_of_current = 0
        self._cells = itertools.count()

    @property
    def layout(self) -> LayoutLimits:
        return self.limits.layout

    @property
    def used_cells(self) -> int:
        return self._count_cells(self.held.values())

    def _count_cells(self, held: Iterable[_Held]) -> int:
        if not self.layout.shares_cells:
            return sum(len(one.cells) for one in held)
        return len({cell for one in held for cell in one.cells})

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
                self.held = {key: held for key, held in self.held.items() if key in command.keep}
                return [self._end()]
            case Decode():
                return self._decode(command)
            case Save():
                return [self._save(command), self._end()]
            case Load():
                return [self._load(command), self._end()]
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
            self.runs.pop(key, None)
        for key in command.header.spill_runs:
            if key in self.runs:
                self.runs[key].saved = replace(self.runs[key].saved, on_disk=True)
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
        assert self.used_cells <= self.layout.cells, f"{self.used_cells} cells of {self.layout.cells}"
        return Stepped(
            shard=self.name,
            command_id=command.command_id,
            outcome=outcome,
            tokens=tuple(rows),
            seconds=self._step_seconds(load),
            prompt_logprobs=prompt_logprobs,
            drafts=drafts,
        )

    def _fails(self, held: Mapping[int, _Held], tokens: int) -> bool:
        """Whether the step fails, if only because ``tokens`` more have no room beside ``held``."""
        if self.fail_next_step is None and self._count_cells(held.values()) + tokens > self.layout.cells:
            self.fail_next_step = StepOutcome.NO_KV
        return self.fail_next_step is not None

    def _cut(self, starts: Iterable[Chunk | Row], taken_over: set[int]) -> None:
        """Cut the sequences back that a failed step was to take over: that cannot be undone."""
        for start in starts:
            if start.sequence_id in taken_over and start.copy is not None:
                self.held[start.sequence_id].cut(start.copy.length)
                self.held[start.sequence_id].ended = True

    def _copied(self, copy: PrefixCopy, own_id: int, setup: SequenceParameters) -> _Held:
        """Make a sequence that begins with a prefix of another, or of what its own id held."""
        source = self.held[copy.source_id]
        assert 1 <= copy.length <= len(source.cells), f"{copy.length} of {len(source.cells)} cells"
        assert not self.layout.whole_only or copy.length == len(source.cells)
        assert source.setup.adapter == setup.adapter, "cells of another adapter"
        cells = source.cells[: copy.length]
        if copy.source_id != own_id and not self.layout.shares_cells:
            cells = [next(self._cells) for _ in cells]
        return _Held(setup, source.tokens[: copy.length], cells)

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
            self._check_chunk(chunk, taken_over)
        new = {chunk.sequence_id: self._new(chunk) for chunk in command.chunks if chunk.setup is not None}
        riders = sum(not self.held[key].ended for key in command.ride)
        if self._fails(self.held | new, load.prompt_tokens + riders):
            self._cut(command.chunks, taken_over)
            return self._stepped(command, [], load)
        self.held |= new
        self._check_adapter(ids)
        logprobs = tuple(
            self._logprobs(chunk) for chunk in command.chunks if self.held[chunk.sequence_id].setup.prompt_logprobs
        )
        rows = [row for sequence_id in command.ride if (row := self._step(sequence_id)) is not None]
        for chunk in command.chunks:
            held = self.held[chunk.sequence_id]
            held.tokens.extend(chunk.token_ids)
            held.cells.extend(next(self._cells) for _ in chunk.token_ids)
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
            row.sequence_id: self._new_row(row, taken_over)
            for row in command.rows
            if row.takes_over or row.sequence_id not in self.held
        }
        if self._fails(self.held | new, load.prompt_tokens):
            self._cut(command.rows, taken_over)
            return self._stepped(command, [], load)
        self.held |= new
        self._check_adapter(ids)
        found = []
        for row in command.rows:
            held = self.held[row.sequence_id]
            assert held.ended, "the row of a sequence that has not ended is kept"
            assert row.token_ids
            assert row.start == len(held.cells) == len(held.tokens)
            held.tokens.extend(row.token_ids)
            held.cells.extend(next(self._cells) for _ in row.token_ids)
            assert len(held.cells) <= self.layout.cells_per_sequence
            if row.top_n_tokens:
                logprobs = next_logprobs(held.tokens, row.adapter)
                top = sorted(range(VOCABULARY_SIZE), key=lambda token: -logprobs[token])[: row.top_n_tokens]
                found.append((row.sequence_id, tuple(Alternative(one, b"x", False, logprobs[one]) for one in top)))
        return replace(self._stepped(command, [], load), evaluations=tuple(found))

    def _new_row(self, row: Row, taken_over: set[int]) -> _Held:
        assert row.sequence_id < self.limits.max_sequences
        setup = _ended_parameters(row.adapter)
        if row.copy is None:
            assert row.sequence_id not in self.held, f"sequence {row.sequence_id} exists"
            return _Held(setup, ended=True)
        if row.copy.source_id != row.sequence_id:
            assert row.sequence_id not in self.held, f"sequence {row.sequence_id} exists"
            assert row.copy.source_id not in taken_over, "copied from one that is taken over"
        held = self._copied(row.copy, row.sequence_id, setup)
        held.ended = True
        return held

    def _check_adapter(self, ids: Iterable[int]) -> None:
        adapters = {self.held[sequence_id].setup.adapter for sequence_id in ids}
        assert len(adapters) == 1, f"a step with the adapters {adapters}"

    def _logprobs(self, chunk: Chunk) -> tuple[int, tuple[PromptToken, ...]]:
        assert len(chunk.token_ids) <= self.limits.max_prompt_logprob_tokens
        held = self.held[chunk.sequence_id]
        prompt = [*held.tokens, *chunk.token_ids][: held.setup.prompt_length]
        logprobs = prompt_logprobs_of(prompt, held.setup.adapter)
        found = logprobs[chunk.start : chunk.start + len(chunk.token_ids)]
        return chunk.sequence_id, found if chunk.copy is None else (NO_LOGPROB, *found[1:])

    def _check_chunk(self, chunk: Chunk, taken_over: set[int]) -> None:
        assert chunk.sequence_id < self.limits.max_sequences
        assert chunk.token_ids, "an empty chunk"
        if chunk.setup is None:
            held = self.held[chunk.sequence_id]
            assert chunk.start == len(held.tokens)
            assert not held.pending
            assert not held.ended
            return
        if chunk.copy is None:
            assert chunk.sequence_id not in self.held, f"sequence {chunk.sequence_id} exists"
            assert chunk.start == 0
            return
        assert chunk.start == chunk.copy.length
        if chunk.copy.source_id != chunk.sequence_id:
            assert chunk.sequence_id not in self.held, f"sequence {chunk.sequence_id} exists"
            assert chunk.copy.source_id not in taken_over, "copied from one that is taken over"

    def _new(self, chunk: Chunk) -> _Held:
        assert chunk.setup is not None
        if chunk.copy is None:
            return _Held(chunk.setup)
        return self._copied(chunk.copy, chunk.sequence_id, chunk.setup)

    def _decode(self, command: Decode) -> list[Event]:
        assert command.sequence_ids
        assert command.max_steps > 0
        self._check_adapter(command.sequence_ids)
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
        held.cells.append(next(self._cells))
        return self._sample(sequence_id, held)

    def _sample(self, sequence_id: int, held: _Held) -> tuple[int, GeneratedToken]:
        token = next_token(held.tokens, held.setup.adapter)
        held.tokens.append(token)
        finish = None
        if token == 0 and not held.setup.ignore_eos:
            finish = FinishReason.EOS_TOKEN
        elif len(held.tokens) >= held.setup.max_length:
            finish = FinishReason.LENGTH
        held.ended = finish is not None
        return sequence_id, GeneratedToken(token, b"x", False, None, (), finish)

    def _save(self, command: Save) -> Saved:
        saved: list[bool] = []
        sizes: list[int] = []
        refused, self.refuse_next_save = self.refuse_next_save, False
        for entry in command.entries:
            held = self.held[entry.sequence_id]
            places = [place for place, _ in entry.cuts]
            end = places[-1]
            assert self.layout.saving is not Saving.NOTHING
            assert 0 <= entry.start < places[0], f"cuts {places} from {entry.start}"
            assert places == sorted(set(places))
            assert end <= len(held.cells), f"saved up to {end} of {len(held.cells)}"
            if self.layout.saving is Saving.WHOLE_ONLY:
                assert (entry.start, len(places)) == (0, 1)
            assert list(entry.own_note.tokens) == held.tokens[entry.start : end]
            key = entry.cuts[-1][1]
            size = 0
            is_there = key in self.runs
            if not is_there and not refused and (self.layout.saving is not Saving.WHOLE_ONLY or end == len(held.cells)):
                is_there = self.memory_used + end - entry.start <= self.limits.memory_bytes
                if is_there:
                    size = end - entry.start
                    run = SavedRun(start=entry.start, cuts=entry.cuts, size_bytes=size, note=entry.own_note)
                    self.runs[key] = _Run(run, held.setup, held.tokens[:end])
            saved.append(is_there)
            sizes.append(size)
            if entry.release:
                del self.held[entry.sequence_id]
        return Saved(
            shard=self.name,
            command_id=command.command_id,
            saved=tuple(saved),
            sizes_bytes=tuple(sizes),
            seconds=0.001,
        )

    def adopt(self, run: _Run | None) -> bool:
        """Keep a run of another shard; False if there is none or no room for it."""
        if run is None:
            return False
        key = run.saved.cuts[-1][1]
        if key not in self.runs:
            if self.memory_used + run.saved.size_bytes > self.limits.memory_bytes:
                return False
            self.runs[key] = _Run(replace(run.saved, on_disk=False), run.setup, run.tokens)
        return True

    @property
    def memory_used(self) -> int:
        return sum(run.saved.size_bytes for run in self.runs.values() if not run.saved.on_disk)

    def _load(self, command: Load) -> Loaded:
        loaded: list[bool] = []
        bad: list[bytes] = []
        breaks, self.break_next_load = self.break_next_load, False
        for entry in command.entries:
            assert entry.sequence_id not in self.held, f"sequence {entry.sequence_id} exists"
            assert entry.sequence_id < self.limits.max_sequences
            shared = self._shared(entry)
            tokens = [*shared.tokens, *entry.token_ids]
            at = len(shared.tokens)
            setup = None
            for piece in entry.slices:
                assert piece.start == at < piece.end
                at = piece.end
                run = self.runs.get(piece.key)
                if breaks or run is None:
                    self.runs.pop(piece.key, None)
                    bad.append(piece.key)
                    continue
                assert run.saved.start <= piece.start
                end = run.saved.cuts[-1][0]
                assert piece.end == end or (piece.end < end and self.layout.saving is not Saving.WHOLE_ONLY)
                assert tokens[: piece.end] == run.tokens[: piece.end]
                assert run.setup.adapter == entry.adapter, "cells of another adapter"
                setup = run.setup
            assert at == len(tokens) <= self.layout.cells_per_sequence
            is_loaded = not bad and self.used_cells + len(entry.token_ids) <= self.layout.cells
            loaded.append(is_loaded)
            if is_loaded:
                assert setup is not None
                cells = [*shared.cells, *(next(self._cells) for _ in entry.token_ids)]
                self.held[entry.sequence_id] = _Held(setup, tokens, cells, ended=True)
        return Loaded(
            shard=self.name,
            command_id=command.command_id,
            loaded=tuple(loaded),
            bad_runs=tuple(bad),
            seconds=0.001,
        )

    def _shared(self, entry: LoadEntry) -> _Held:
        """Return what a loaded sequence begins with of another, if anything."""
        setup = _ended_parameters(entry.adapter)
        if entry.copy is None:
            return _Held(setup)
        assert self.layout.shares_cells, "loaded cells are shared in the unified layout only"
        assert self.layout.saving is Saving.ANY
        return self._copied(entry.copy, entry.sequence_id, setup)

    def _set_layout(self, command: SetLayout) -> LayoutSet:
        other = self.limits.other_layout
        assert other is not None
        assert other.layout is command.layout
        if self.refuse_next_layout:
            self.refuse_next_layout = False
            self.limits = replace(self.limits, other_layout=None)
            layout = self.layout
            return LayoutSet(shard=self.name, command_id=command.command_id, layout=layout, lost=(), seconds=0.2)
        self.limits = replace(self.limits, layout=other, other_layout=self.limits.layout)
        lost = tuple(self.held)[:1] if self.lose_next_moved else ()
        self.lose_next_moved = False
        for sequence_id in lost:
            del self.held[sequence_id]
        for held in self.held.values():
            assert len(held.cells) <= other.cells_per_sequence, "moved to a layout that has no room for it"
            held.cells = [next(self._cells) for _ in held.cells]
        assert self.used_cells <= other.cells
        return LayoutSet(shard=self.name, command_id=command.command_id, layout=other, lost=lost, seconds=0.2)
