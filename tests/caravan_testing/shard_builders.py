"""Short ways to make commands, and an engine with a driver that executes them."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from time import perf_counter_ns
from typing import Any

import numpy as np

from caravan_proto.messages.commands import (
    Chunk,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    LoadEntry,
    Prefill,
    PrefixCopy,
    Row,
    RowOutputs,
    RunSlice,
    Save,
    SaveEntry,
    SetLayout,
)
from caravan_proto.messages.constraint import Constraint, ConstraintKind, Thought
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.results import FinishReason, Holdings, LayoutSet, Loaded, Saved, StepOutcome
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Backend, DecodeOutcome, DraftBlock, TokenBatch
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import EMPTY_STATE, next_state, toy_logits
from caravan_shard.constraints.grammar import Grammar, Problem, make_matcher
from caravan_shard.constraints.tokenizer import TokenTable, make_tokenizer
from caravan_shard.engine.drafts import DraftBudget, Drafting
from caravan_shard.engine.engine import Engine
from caravan_shard.engine.replies import Replies
from caravan_shard.engine.worker import Worker
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import Evaluations, Refusal, Result, StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_testing.waiting import eventually, in_time


@dataclass(slots=True)
class Output:
    """The output of a sequence: its text without control tokens, and how it ended."""

    data: bytes = b""
    tokens: int = 0
    finish: FinishReason | None = None


class Grammars:
    """Compiles constraints for a backend in this process. The sources must not be hostile."""

    def __init__(self, backend: Backend) -> None:
        self._table = TokenTable.of(backend.vocabulary, backend.facts)
        self._tokenizer = make_tokenizer(self._table)

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, which must succeed."""
        matcher = make_matcher(constraint, self._tokenizer)
        assert not isinstance(matcher, Problem), matcher.sentence
        return Grammar(matcher, self._tokenizer, tuple(self._table.eog_ids))


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and the grammar that its output must match."""

    prompt: Sequence[int]
    grammar: Grammar | None
    sampling: SamplingParams


def run_jobs(engine: Engine, jobs: Sequence[Job], *, slots: int, max_new: int) -> list[Output]:
    """Run all jobs, at most ``slots`` at a time; return their outputs in order."""
    outputs = [Output() for _ in jobs]
    waiting = list(range(len(jobs)))[::-1]
    running: dict[int, int] = {}
    released: list[int] = []
    while waiting or running:
        free = [slot for slot in range(slots) if slot not in running]
        started = {slot: waiting.pop() for slot in free[: len(waiting)]}
        if started:
            chunks = [_chunk(slot, jobs[job], max_new) for slot, job in started.items()]
            result = engine.prefill(
                Prefill(chunks=chunks, ride=sorted(running), header=Header(release=released)),
                perf_counter_ns(),
            )
            running |= started
            released = []
        else:
            assert engine.begin_decode(Decode(sequence_ids=sorted(running), max_steps=1)) is None
            found = engine.decode_step(sorted(running), perf_counter_ns())
            assert found is not None
            result = found
        assert isinstance(result, StepResult), result
        rows = result.rows
        for slot, piece, special, finish in zip(
            rows.sequence_ids, rows.pieces, rows.specials, rows.finish_reasons, strict=True
        ):
            output = outputs[running[slot]]
            output.data += b"" if special else piece
            output.tokens += 1
            if finish is not None:
                output.finish = finish
                del running[slot]
                released.append(slot)
    engine.release_all()
    return outputs


def _chunk(slot: int, job: Job, max_new: int) -> Chunk:
    parameters = PreparedParameters(
        sampling=job.sampling, prompt_length=len(job.prompt), max_length=len(job.prompt) + max_new, grammar=job.grammar
    )
    return Chunk(sequence_id=slot, start=0, token_ids=job.prompt, last=True, setup=parameters)


def toy_prompt(text: str) -> list[int]:
    """Return the toy vocabulary's tokens of ``text``."""
    return list(text.encode())


def first_chunk(
    sequence_id: int,
    tokens: Sequence[int],
    *,
    max_new: int = 50,
    total: int | None = None,
    prompt_length: int | None = None,
    last: bool = True,
    copy: PrefixCopy | None = None,
    ignore_eos: bool = False,
    stop_token_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    sampling: SamplingParams | None = None,
    grammar: Grammar | None = None,
    thought: Thought | None = None,
    **sampling_fields: Any,
) -> Chunk:
    """Make the first chunk of a sequence; ``total`` is the length of the prompt if ``tokens`` are a part of it."""
    start = copy.length if copy is not None else 0
    length = total if total is not None else start + len(tokens)
    return Chunk(
        sequence_id=sequence_id,
        start=start,
        token_ids=tokens,
        last=last,
        setup=PreparedParameters(
            sampling=sampling or SamplingParams(**{"temperature": 0.0, **sampling_fields}),
            prompt_length=prompt_length if prompt_length is not None else length,
            max_length=length + max_new,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            grammar=grammar,
            thought=thought,
        ),
        copy=copy,
    )


def with_parameters(chunk: Chunk, **fields: Any) -> Chunk:
    """Replace fields of a first chunk's PreparedParameters."""
    assert chunk.setup is not None
    return replace(chunk, setup=replace(chunk.setup, **fields))


def toy_grammar(source: str, kind: ConstraintKind = ConstraintKind.REGEX) -> Grammar:
    """Compile a constraint for the toy vocabulary."""
    return _toy_grammars().compile(Constraint(kind, source))


@cache
def _toy_grammars() -> Grammars:
    return Grammars(ToyBackend())


def next_chunk(sequence_id: int, start: int, tokens: Sequence[int], *, last: bool = True) -> Chunk:
    """Make a further chunk of a sequence."""
    return Chunk(sequence_id=sequence_id, start=start, token_ids=tokens, last=last)


def row(sequence_id: int, tokens: Sequence[int], start: int = 0, **fields: Any) -> Row:
    """Make a row of an Evaluate, with all outputs; a ``copy`` gives it its start."""
    copy: PrefixCopy | None = fields.get("copy")
    fields = {"outputs": RowOutputs.ALL, **fields}
    return Row(sequence_id=sequence_id, start=start if copy is None else copy.length, token_ids=tokens, **fields)


def header(
    *,
    release: Sequence[int] = (),
    park: Mapping[int, int] | None = None,
    drop: Sequence[bytes] = (),
    spill: Sequence[bytes] = (),
) -> Header:
    """Make a header; ``park`` has the length to keep by sequence id."""
    return Header(release=release, park=[*(park or {}).items()], drop_runs=drop, spill_runs=spill)


def run_key(tokens: Sequence[int], adapter: str = "") -> bytes:
    """Return the key of a run that ends behind ``tokens``."""
    return blake2b(repr((list(tokens), adapter)).encode(), digest_size=16).digest()


def save_entry(
    sequence_id: int, tokens: Sequence[int], start: int = 0, *cuts: int, adapter: str = "", release: bool = False
) -> SaveEntry:
    """Save the cells of ``tokens`` from ``start`` on, with keys at ``cuts`` and at the end."""
    ends = (*cuts, len(tokens))
    return SaveEntry(
        sequence_id=sequence_id,
        start=start,
        cuts=tuple((end, run_key(tokens[:end], adapter)) for end in ends),
        release=release,
    )


def state_entry(sequence_id: int, tokens: Sequence[int], *, release: bool = False) -> SaveEntry:
    """Save the recurrent state after ``tokens``."""
    end = len(tokens)
    return SaveEntry(sequence_id=sequence_id, start=end, cuts=((end, _state_key(tokens)),), release=release)


def _state_key(tokens: Sequence[int]) -> bytes:
    return run_key(tokens, "the state")


def with_state(entry: LoadEntry, tokens: Sequence[int]) -> LoadEntry:
    """Return ``entry`` with the recurrent state after ``tokens``, which are all of its sequence."""
    return replace(entry, slices=[*entry.slices, RunSlice(key=_state_key(tokens), start=len(tokens), end=len(tokens))])


def load_entry(
    sequence_id: int,
    tokens: Sequence[int],
    *parts: tuple[Sequence[int], int],
    adapter: str = "",
    copy: PrefixCopy | None = None,
) -> LoadEntry:
    """Load ``tokens``, of which ``copy`` provides the first ones.

    Each part has the tokens up to the end of a run, and where its cells end. All by default.
    """
    first = 0 if copy is None else copy.length
    slices, start = [], first
    for run_tokens, end in parts or ((tokens, len(tokens)),):
        slices.append(RunSlice(key=run_key(run_tokens, adapter), start=start, end=end))
        start = end
    return LoadEntry(sequence_id=sequence_id, token_ids=tokens[first:], slices=slices, adapter=adapter, copy=copy)


class EngineDriver:
    """Executes commands that must succeed, and collects the output of each sequence."""

    def __init__(
        self,
        backend: Any = None,
        *,
        sampling_threads: int = 1,
        runs: RunStore | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """Without a ``drafting``, all drafts that fit are used, whatever they cost."""
        self.backend = backend if backend is not None else ToyBackend()
        store = RunStore(1 << 30) if runs is None else runs
        self.engine = Engine(self.backend, sampling_threads, store, drafting or Drafting(always=True))
        self.output: dict[int, list[int]] = {}

    def prefill(self, *chunks: Chunk, **command: Any) -> StepResult:
        """Run a step as `try_prefill` does; its outcome must be OK."""
        result = self.try_prefill(*chunks, **command)
        for chunk in chunks:
            if chunk.setup is not None:
                self.output[chunk.sequence_id] = []
        return self._collect(result)

    def try_prefill(
        self,
        *chunks: Chunk,
        riders: Sequence[int] = (),
        release: Sequence[int] = (),
        park: Mapping[int, int] | None = None,
    ) -> StepResult | Refusal:
        """Run a step and return any outcome; ``park`` has the length to keep by sequence id."""
        command = Prefill(chunks=chunks, ride=riders, header=header(release=release, park=park))
        return self.engine.prefill(command, perf_counter_ns())

    def evaluate(self, *rows: Row, **fields: Any) -> Evaluations:
        """Evaluate rows; the outcome must be OK. ``fields`` are those of the header."""
        result = self.try_evaluate(*rows, **fields)
        assert isinstance(result, StepResult), result
        assert result.outcome is StepOutcome.OK
        assert not result.rows.token_ids
        assert result.evaluations is not None
        return result.evaluations

    def try_evaluate(self, *rows: Row, **fields: Any) -> StepResult | Refusal:
        """Evaluate rows and return any outcome; ``fields`` are those of the header."""
        return self.engine.evaluate(Evaluate(rows=rows, header=header(**fields)), perf_counter_ns())

    def decode(self, sequence_ids: Sequence[int], steps: int = 1_000, max_draft_tokens: int = 0) -> list[StepResult]:
        """Run steps until all sequences have ended, at most ``steps``."""
        command = Decode(sequence_ids=sequence_ids, max_steps=steps, max_draft_tokens=max_draft_tokens)
        assert self.engine.begin_decode(command) is None
        results = []
        while steps > 0:
            result = self.engine.decode_step(sequence_ids, perf_counter_ns(), DraftBudget(max_draft_tokens, steps - 1))
            if result is None:
                break
            results.append(self._collect(result))
            steps -= results[-1].most_tokens
        return results

    def decode_once(self, sequence_ids: Sequence[int], budget: DraftBudget) -> StepResult:
        """Run one step, with drafts within ``budget``."""
        result = self.engine.decode_step(sequence_ids, perf_counter_ns(), budget)
        assert result is not None
        return self._collect(result)

    def checked_free_cells(self) -> int:
        """Return the number of free cells. The engine and the toy cache must agree on it."""
        free = self.engine.free_cells
        assert free == self.backend.capacity.current.cells - self.backend.cache.used
        return free

    def keep(self, *sequence_ids: int) -> Holdings:
        """Execute FilterBatch."""
        holdings = self.engine.filter_batch(FilterBatch(keep=sequence_ids))
        assert isinstance(holdings, Holdings)
        return holdings

    def save(self, *entries: SaveEntry, **fields: Any) -> list[bool]:
        """Execute Save; ``fields`` are those of the header."""
        result = self.engine.save(Save(entries=entries, header=header(**fields)), perf_counter_ns())
        assert isinstance(result, Saved), result
        return list(result.saved)

    def load(self, *entries: LoadEntry, **fields: Any) -> list[bool]:
        """Execute Load; ``fields`` are those of the header."""
        result = self.engine.load(Load(entries=entries, header=header(**fields)), perf_counter_ns())
        assert isinstance(result, Loaded), result
        return list(result.loaded)

    def set_layout(self, layout: KvLayout) -> list[int]:
        """Execute SetLayout; return the ids of lost sequences."""
        result = self.engine.set_layout(SetLayout(layout=layout), perf_counter_ns())
        assert isinstance(result, LayoutSet), result
        return list(result.lost)

    def _collect(self, result: StepResult | Refusal) -> StepResult:
        assert isinstance(result, StepResult), result
        assert result.outcome is StepOutcome.OK
        for sequence_id, token in zip(result.rows.sequence_ids, result.rows.token_ids, strict=True):
            self.output[sequence_id].append(token)
        return result


class ToyDraftModel(ToyBackend):
    """The toy model, whose tokens are wrong in every ``wrong_every``-th step; 0: never, 1: always."""

    def __init__(self, *, wrong_every: int = 0, **fields: Any) -> None:
        super().__init__(**fields)
        self.wrong_every = wrong_every
        self.steps = 0

    def logits(self, rows: int) -> Floats:
        """Return the right ones, or those of the next tokens of the vocabulary."""
        self.steps += 1
        is_wrong = self.wrong_every and self.steps % self.wrong_every == 0
        return np.roll(super().logits(rows), 1, axis=1) if is_wrong else super().logits(rows)


class ToyBlockModel(ToyDraftModel):
    """The toy model, which drafts four tokens in a pass."""

    @property
    def block(self) -> DraftBlock:
        """A block of the last token and four unknown ones."""
        return DraftBlock(rows=5, unknown=7, first=1)

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Read tokens, or draft after each sequence's first one."""
        if not batch.outputs.any():
            return super().decode(batch)
        forced = self.hook(batch) if self.hook is not None else None
        if forced is not None:
            return forced
        rows = self.block.rows
        assert batch.outputs.all(), "a block has outputs of all its rows"
        assert len(batch.tokens) <= self.capacity.max_batch_tokens, "the pass is too large"
        states = []
        for row in range(0, len(batch.tokens), rows):
            sequence_id, start = int(batch.sequence_ids[row]), int(batch.positions[row])
            assert start == self.cache.length(sequence_id), "it has not read what comes before"
            assert (batch.sequence_ids[row : row + rows] == sequence_id).all(), "a block is not whole"
            assert batch.positions[row : row + rows].tolist() == list(range(start, start + rows))
            assert batch.tokens[row + 1 : row + rows].tolist() == [self.block.unknown] * (rows - 1)
            state, token = self.cache.state(sequence_id), int(batch.tokens[row])
            states.append(state)
            for position in range(start, start + rows - 1):
                state = next_state(state, token, position)
                states.append(state)
                token = int(toy_logits(np.array([state], np.uint64)).argmax())
        used = Counter(batch.sequence_ids.tolist())
        assert self.cache.has_room(used), "there is no room for the blocks"
        self._logits = toy_logits(np.array(states, np.uint64))
        return DecodeOutcome.OK


def check_draft_cells(driver: EngineDriver, draft_model: ToyBackend) -> None:
    """Check that the draft model holds nothing but computed beginnings of held sequences."""
    held = driver.engine._pool.held
    for sequence_id, cells in draft_model.cache.held.items():
        if not cells:
            continue
        sequence = held[sequence_id]
        assert len(cells) <= sequence.computed, f"sequence {sequence_id}"
        states = [EMPTY_STATE]
        for position, token in enumerate(sequence.tokens[: len(cells)]):
            states.append(next_state(states[-1], token, position))
        assert [cell.state for cell in cells] == states[1:], f"sequence {sequence_id}"
    assert draft_model.cache.used <= draft_model.capacity.current.cells


def make_runs(_backend: Backend) -> RunStore:
    return RunStore(1 << 30)


@asynccontextmanager
async def worker_on(backend: ToyBackend) -> AsyncIterator[tuple[Worker, Engine]]:
    worker = Worker(lambda: backend, 1, make_runs)
    engine = await worker.start()
    try:
        yield worker, engine
    finally:
        await worker.stop(5.0)


async def all_of(replies: Replies) -> list[Result]:
    results: list[Result] = []
    async with in_time("all results"):
        while (together := await replies.next()) is not None:
            results += together
    return results


async def until(condition: Callable[[], bool]) -> None:
    await eventually(condition)
