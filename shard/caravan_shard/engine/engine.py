"""Executes commands: assemble a step, decode it, commit it. Only a successful step changes what the shard knows.

Only the worker's thread calls the methods. Any thread may read `step_count`, `sequence_count`, `unfinished_count` and
`failures_in_a_row`, and may set `draining`, which refuses new sequences.
"""

import logging
from collections.abc import Iterable, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from caravan_proto.errors import ShardError
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
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved, StepOutcome
from caravan_shard.backends.base import Backend, DecodeOutcome
from caravan_shard.checks.command import CommandCheck
from caravan_shard.checks.media import FoundMedia
from caravan_shard.constraints.matching import Finder
from caravan_shard.engine.adapters import LeasedAdapters
from caravan_shard.engine.drafts import NO_DRAFTS, DraftBudget, Drafting
from caravan_shard.engine.logprobs import take_evaluations, take_prompt_logprobs
from caravan_shard.engine.step import Part, assemble, candidates_of, find_media, parts_with_media
from caravan_shard.engine.token_rows import sample_candidates, sample_rows, verify_drafts
from caravan_shard.media import MediaStore
from caravan_shard.protocol.commands import Adopt, EmbedText, KnowContents
from caravan_shard.protocol.results import (
    Adopted,
    DraftRows,
    Embedded,
    Evaluations,
    PromptLogprobs,
    Refusal,
    StepResult,
    StepTimings,
    TokenRows,
)
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sequences.pool import SequencePool
from caravan_shard.sequences.runs import RunStore
from caravan_shard.sequences.sequence import Phase, log_traced
from caravan_shard.speculation.model_drafter import ModelDrafter

_log = logging.getLogger(__name__)

_INCOMPLETE = {DecodeOutcome.NO_KV: StepOutcome.NO_KV, DecodeOutcome.ABORTED: StepOutcome.ABORTED}


_MEDIA_BYTES = 64 << 20


class _Found(NamedTuple):
    """What a step has found out."""

    rows: TokenRows
    prompt_logprobs: PromptLogprobs | None = None
    evaluations: Evaluations | None = None
    drafts: DraftRows | None = None


class Engine:
    """Executes the commands of a router on the sequences of one backend."""

    def __init__(
        self,
        backend: Backend,
        sampling_threads: int,
        runs: RunStore,
        drafting: Drafting | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self.backend = backend
        self._sampler = Sampler(backend.candidate_filter, sampling_threads, backend.joint_draw, backend.joint_logprobs)
        self._finder = Finder(sampling_threads)
        self._drafting = Drafting() if drafting is None else drafting
        self.runs = runs
        drafter = None
        if backend.draft_model is not None and backend.capacity.max_draft_tokens:
            drafter = ModelDrafter(backend.draft_model, self._sampler, backend.facts.vocabulary_size)
        self._drafting.use_model(drafter)
        self._pool = SequencePool(backend, runs, drafter)
        self.adapters = LeasedAdapters(backend, self._unfinished_adapters)
        self.media = MediaStore(_MEDIA_BYTES) if media is None else media
        self.step_count = 0
        self.failures_in_a_row = 0
        self.draining = False

    @property
    def sequence_count(self) -> int:
        """Number of sequences held."""
        return len(self._pool.held)

    @property
    def unfinished_count(self) -> int:
        """Number of sequences that have not ended."""
        # Copied first: the worker's thread may change the dict meanwhile.
        held = list(self._pool.held.values())
        return sum(sequence.phase is not Phase.ENDED for sequence in held)

    def _unfinished_adapters(self) -> set[str]:
        held = self._pool.held.values()
        return {sequence.parameters.adapter for sequence in held if sequence.phase is not Phase.ENDED}

    @property
    def free_cells(self) -> int:
        """Number of cells that no sequence holds."""
        return self._pool.free_cells

    @property
    def _limits(self) -> LayoutLimits:
        return self.backend.capacity.current

    def prefill(self, command: Prefill, started_ns: int) -> StepResult | Refusal:
        """Run one step over chunks and riders."""
        media = find_media(self.media, command.chunks)
        refusal = self._new_check().prefill(command, facts=self.adapters.facts, media=media, draining=self.draining)
        return refusal or self._run_new(command, command.chunks, media, started_ns)

    def evaluate(self, command: Evaluate, started_ns: int) -> StepResult | Refusal:
        """Run one step over rows."""
        media = find_media(self.media, command.rows)
        refusal = self._new_check().evaluate(command, facts=self.adapters.facts, media=media, draining=self.draining)
        return refusal or self._run_new(command, command.rows, media, started_ns)

    def begin_decode(self, command: Decode) -> Refusal | None:
        """Check the command and carry out its header; `decode_step` follows."""
        return self._accept(command, self._new_check().decode(command))

    def decode_step(
        self, sequence_ids: Sequence[int], started_ns: int, budget: DraftBudget = NO_DRAFTS
    ) -> StepResult | Refusal | None:
        """Run one step over the sequences that have not ended, drafts within ``budget``; None if all have ended."""
        parts = _decode_parts(self._pool, sorted(sequence_ids))
        if not parts:
            return None
        if not (budget.total and budget.each):
            self._drafting.pause()
            return self._run_step(parts, started_ns)
        parts = self._drafting.choose(parts, budget, self._limits)
        result = self._run_step(parts, started_ns)
        if isinstance(result, StepResult) and result.outcome is StepOutcome.OK:
            self._drafting.learn(parts, result)
        return result

    def filter_batch(self, command: FilterBatch) -> Holdings | Refusal:
        """Keep some sequences and release all others."""
        if (refusal := self._accept(command, self._new_check().filter_batch(command))) is not None:
            return refusal
        self._pool.release(self._pool.held.keys() - set(command.keep))
        return Holdings(free_cells=self.free_cells, sequence_ids=sorted(self._pool.held))

    def save(self, command: Save, started_ns: int) -> Saved | Refusal:
        """Save runs."""
        if (refusal := self._accept(command, self._new_check().save(command))) is not None:
            return refusal
        sizes = [self._pool.save(entry) for entry in command.entries]
        return Saved(
            saved=[size is not None for size in sizes],
            sizes_bytes=[size or 0 for size in sizes],
            seconds=_seconds_since(started_ns),
        )

    def load(self, command: Load, started_ns: int) -> Loaded | Refusal:
        """Make sequences of saved runs."""
        checked = self._new_check().load(command, facts=self.adapters.facts, draining=self.draining)
        if (refusal := self._accept(command, checked)) is not None:
            return refusal
        bad_runs = [self._pool.load(entry) for entry in command.entries]
        return Loaded(
            loaded=[bad is None for bad in bad_runs],
            bad_runs=list(dict.fromkeys(key for bad in bad_runs for key in bad or ())),
            seconds=_seconds_since(started_ns),
        )

    def set_layout(self, command: SetLayout, started_ns: int) -> LayoutSet | Refusal:
        """Give the cells another layout."""
        if (refusal := self._accept(command, self._new_check().set_layout(command))) is not None:
            return refusal
        assert command.layout is not None
        lost = self._pool.set_layout(command.layout) if command.layout is not self._limits.layout else []
        return LayoutSet(layout=self._limits, lost=lost, seconds=_seconds_since(started_ns), shares_beginnings=True)

    def embed(self, commands: Sequence[EmbedText], lane: int | None = None) -> list[Embedded | Refusal]:
        """Embed texts in one forward pass. ``lane``: see `Backend.embed`; the only method that others may call."""
        made = self.backend.embed([command.tokens for command in commands], lane)
        return [
            Embedded(values)
            if values is not None
            else Refusal(ShardError.FORWARD_FAILED, f"a text of {len(command.tokens)} tokens has no embedding")
            for command, values in zip(commands, made, strict=True)
        ]

    def adopt(self, command: Adopt) -> Adopted:
        """Keep a run of another shard."""
        return Adopted(self._pool.adopt(command.run, command.state))

    def know_contents(self, command: KnowContents) -> None:
        """Note what is in the files of the model, and use what was saved before."""
        self.backend.contents.know(command.contents)
        command.use_saved()

    def release_all(self) -> None:
        """Forget every sequence. Saved runs stay."""
        self._pool.clear()

    def close(self) -> None:
        """Free the backend and close the store of runs. No other method may be called afterwards.

        Cells of sequences end with the backend, which has none left if a change of its layout failed.
        """
        self._pool.clear(frees_cells=False)
        self.runs.close()
        self._sampler.close()
        self._finder.close()
        self.backend.close()

    def _accept(self, command: Command, refusal: Refusal | None) -> Refusal | None:
        """Carry out the header of a command, unless there is a ``refusal``, which is returned."""
        if refusal is None:
            self._pool.apply(command.header)
        return refusal

    def _new_check(self) -> CommandCheck:
        return CommandCheck(self._pool.held, self.runs, self.backend.capacity)

    def _run_new(
        self, command: Prefill | Evaluate, chunks: Sequence[Chunk] | Sequence[Row], media: FoundMedia, started_ns: int
    ) -> StepResult | Refusal:
        """Carry out the header of a checked command, make the copies of ``chunks``, then run a step over them."""
        self._pool.apply(command.header)
        if missing := tuple(media_id for media_id, slices in media.items() if slices is None):
            timings = _timings(started_ns, 0, 0)
            return StepResult(StepOutcome.MEDIA_MISSING, TokenRows(), timings, missing_media=missing)
        parts = [_new_part(self._pool, chunk) for chunk in chunks]
        if media:
            parts = parts_with_media(parts, chunks, media, self.backend.facts.media)
        if isinstance(command, Prefill):
            parts += _decode_parts(self._pool, command.ride)
        if not parts:
            return StepResult(StepOutcome.OK, TokenRows(), _timings(started_ns, 0, 0))
        parts.sort(key=lambda part: part.sequence.sequence_id)
        # Taking over cuts a sequence back, and the first passes of a step with media extend one. Where that cannot be
        # undone, the backend's own NO_KV would come too late.
        if any(chunk.takes_over or chunk.media for chunk in chunks) and not _has_room(self._pool, self._limits, parts):
            return StepResult(StepOutcome.NO_KV, TokenRows(), _timings(started_ns, 0, 0))
        self._pool.share(chunks)
        self._drafting.pause()
        return self._run_step(parts, started_ns)

    def _run_step(self, parts: list[Part], started_ns: int) -> StepResult | Refusal:
        self._begin_masks(parts)
        batch = assemble(parts)
        if self.backend.gives_candidates and not batch.media:
            batch = batch._replace(candidates=candidates_of(parts))
        forward_from = perf_counter_ns()
        outcome = self.backend.decode(batch)
        forward_ns = perf_counter_ns() - forward_from
        sampling_from = perf_counter_ns()
        self._finder.wait()
        if outcome is DecodeOutcome.OK:
            found = self._commit(parts, batch.output_count)
            self._pool.spoiled.update(found.rows.without_logits)
            timings = _timings(started_ns, forward_ns, perf_counter_ns() - sampling_from)
            return StepResult(
                StepOutcome.OK, found.rows, timings, found.prompt_logprobs, found.evaluations, found.drafts
            )
        for part in parts:
            self._pool.cut_back(part.sequence.sequence_id, part.start)
        if outcome is DecodeOutcome.NO_KV and any(part.draft for part in parts):
            return self._run_step([part.without_draft() for part in parts], started_ns)
        for part in parts:
            if part.prompt and part.sequence.matching is not None:
                # The prompt may be sent again in other chunks.
                part.sequence.matching.reset()
        if outcome in _INCOMPLETE:
            return StepResult(_INCOMPLETE[outcome], TokenRows(), _timings(started_ns, forward_ns, 0))
        self.failures_in_a_row += 1
        _log.error("a forward pass failed", extra={"outcome": outcome.value, "in_a_row": self.failures_in_a_row})
        for part in parts:
            log_traced(part.sequence, "its forward pass failed", outcome=outcome.value)
        return Refusal(ShardError.FORWARD_FAILED, f"the forward pass failed ({outcome.value})")

    def _begin_masks(self, parts: list[Part]) -> None:
        """Begin to compute the masks of constrained sequences, so that they are ready after the forward pass."""
        work = []
        for part in parts:
            sequence = part.sequence
            if sequence.matching is not None and part.samples:
                tokens = [*sequence.tokens, *part.tokens] if part.prompt else ()
                work.append((sequence.matching, tokens[sequence.parameters.prompt_length :]))
        if work:
            self._finder.begin(work)

    def _commit(self, parts: list[Part], output_count: int) -> _Found:
        self.step_count += 1
        self.failures_in_a_row = 0
        if parts[0].row is not None:
            return _Found(TokenRows(), evaluations=self._commit_rows(parts, output_count))
        for part in parts:
            if part.new:
                self._pool.held[part.sequence.sequence_id] = part.sequence
                log_traced(part.sequence, "sequence started", cached=part.start)
            if part.prompt:
                part.sequence.extend(part.tokens)
                part.sequence.spans += part.spans
            part.sequence.computed += len(part.tokens)
        if output_count == 0:
            return _Found(TokenRows())
        candidates = self.backend.candidates(output_count)
        sampled = [part.sequence for part in parts if part.samples]
        if candidates is not None:
            return _Found(sample_candidates(sampled, candidates, self.backend, self._sampler))
        logits = self.backend.logits(output_count)
        if any(part.draft for part in parts):
            rows, drafts = verify_drafts(parts, logits, self.backend, self._sampler)
            for part in parts:
                self._pool.forget_rejected(part.sequence)
            return _Found(rows, drafts=drafts)
        prompt_logprobs = None
        if any(part.leading_outputs for part in parts):
            prompt_logprobs, logits = take_prompt_logprobs(parts, logits, self.backend.vocabulary)
        rows = sample_rows(sampled, logits, self.backend, self._sampler) if sampled else TokenRows()
        if prompt_logprobs is not None:
            rows.without_logits += [one for one in prompt_logprobs.without_logits if one not in rows.without_logits]
        return _Found(rows, prompt_logprobs)

    def _commit_rows(self, parts: list[Part], output_count: int) -> Evaluations:
        evaluations = Evaluations()
        if output_count:
            evaluations = take_evaluations(parts, self.backend.logits(output_count), self.backend.vocabulary)
        for part in parts:
            assert part.row is not None
            if part.new:
                self._pool.held[part.row.sequence_id] = part.sequence
            self._pool.keep_row(part.sequence, part.row)
        return evaluations


def _has_room(pool: SequencePool, limits: LayoutLimits, parts: Sequence[Part]) -> bool:
    """Whether the tokens of ``parts`` fit, also into what one sequence may have in the split layout."""
    if any(part.start + len(part.tokens) > limits.cells_per_sequence for part in parts):
        return False
    return pool.has_room((part.sequence for part in parts), sum(len(part.tokens) for part in parts))


def _new_part(pool: SequencePool, chunk: Chunk | Row) -> Part:
    """Return the part of a chunk or a row, which may begin a sequence."""
    if isinstance(chunk, Chunk):
        new = chunk.setup is not None
        sequence = pool.make(chunk) if new else pool.held[chunk.sequence_id]
        return Part(
            sequence=sequence, start=chunk.start, tokens=chunk.token_ids, samples=chunk.last, prompt=True, new=new
        )
    new = chunk.takes_over or chunk.sequence_id not in pool.held
    sequence = pool.make_ended(chunk) if new else pool.held[chunk.sequence_id]
    return Part(sequence=sequence, start=chunk.start, tokens=chunk.token_ids, samples=False, new=new, row=chunk)


def _decode_parts(pool: SequencePool, sequence_ids: Iterable[int]) -> list[Part]:
    parts = []
    for sequence_id in sequence_ids:
        sequence = pool.held[sequence_id]
        if sequence.phase is Phase.RUNNING:
            parts.append(Part(sequence=sequence, start=sequence.computed, tokens=sequence.tokens[-1:], samples=True))
    return parts


def _seconds_since(started_ns: int) -> float:
    return (perf_counter_ns() - started_ns) / 1e9


def _timings(started_ns: int, forward_ns: int, sample_ns: int) -> StepTimings:
    return StepTimings(forward_ns=forward_ns, sample_ns=sample_ns, total_ns=perf_counter_ns() - started_ns)
