"""Assemble, decode, commit: a pass changes what the shard knows only once it succeeded.

Not thread-safe: the worker's thread calls it. `step_count`, `sequence_count` and `failures_in_a_row` may be
read from any.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import count
from time import perf_counter_ns

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Backend, DecodeOutcome, KvLayout
from caravan_shard.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_shard.forward import Part, assemble
from caravan_shard.penalties import PenaltyCounts
from caravan_shard.results import Holdings, Refusal, StepOutcome, StepResult, Timings, TokenRows
from caravan_shard.rows import sample_rows
from caravan_shard.sampling import Sampler
from caravan_shard.sequences import Phase, used_cells
from caravan_shard.sequences import Sequence as ShardSequence
from caravan_shard.validation import CommandCheck

_log = logging.getLogger(__name__)

_UNFINISHED = {DecodeOutcome.NO_KV: StepOutcome.NO_KV, DecodeOutcome.ABORTED: StepOutcome.ABORTED}


class Engine:
    """The sequences of one backend."""

    def __init__(self, backend: Backend, sampling_threads: int) -> None:
        self.backend = backend
        self._sampler = Sampler(backend.candidate_filter, sampling_threads)
        self._sequences: dict[int, ShardSequence] = {}
        self._births = count()
        self.step_count = 0
        self.failures_in_a_row = 0
        self.draining = False

    @property
    def sequence_count(self) -> int:
        """Sequences held."""
        return len(self._sequences)

    @property
    def free_cells(self) -> int:
        """Cells no sequence holds."""
        capacity = self.backend.capacity
        return capacity.cells - used_cells(self._sequences.values(), capacity.layout)

    def prefill(self, command: Prefill, started_ns: int) -> StepResult | Refusal:
        """One pass over chunks and riders."""
        refusal = self._check().prefill(command)
        if refusal is not None:
            return refusal
        self._release(command.release_ids)
        parts = [self._chunk_part(chunk) for chunk in command.chunks]
        parts += self._decode_parts(command.rider_ids)
        if not parts:
            return StepResult(StepOutcome.OK, TokenRows(), _timings(started_ns, 0, 0))
        parts.sort(key=lambda part: part.sequence.sequence_id)
        for chunk in command.chunks:
            if chunk.copy is not None:
                self._share_prefix(chunk.copy.source_id, chunk.sequence_id, chunk.copy.length)
        return self._run(parts, started_ns)

    def begin_decode(self, command: Decode) -> Refusal | None:
        """Check the command and do its releases; `decode_step` follows."""
        refusal = self._check().decode(command)
        if refusal is None:
            self._release(command.release_ids)
        return refusal

    def decode_step(self, sequence_ids: Sequence[int], started_ns: int) -> StepResult | Refusal | None:
        """One pass over those that have not ended; None if all have."""
        parts = self._decode_parts(sorted(sequence_ids))
        return self._run(parts, started_ns) if parts else None

    def filter_batch(self, command: FilterBatch) -> Holdings | Refusal:
        """Keep some sequences."""
        refusal = self._check().filter_batch(command)
        if refusal is not None:
            return refusal
        self._release(self._sequences.keys() - set(command.keep_ids))
        return Holdings(self.free_cells, sorted(self._sequences))

    def release_all(self) -> None:
        """Forget every sequence."""
        self._release(list(self._sequences))

    def close(self) -> None:
        """Free the backend; nothing may be called after it."""
        self._sampler.close()
        self.backend.close()

    def _check(self) -> CommandCheck:
        return CommandCheck(
            self._sequences,
            self.backend.capacity,
            self.backend.facts.vocabulary_size,
            draining=self.draining,
        )

    def _release(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            del self._sequences[sequence_id]
            self.backend.trim(sequence_id, 0)

    def _share_prefix(self, source_id: int, sequence_id: int, length: int) -> None:
        self.backend.copy(source_id, sequence_id, length)
        held = self.backend.length(sequence_id)
        assert held == length, f"sequence {sequence_id} holds {held} of {length} shared tokens"

    def _chunk_part(self, chunk: Chunk) -> Part:
        new = chunk.parameters is not None
        sequence = self._new_sequence(chunk) if new else self._sequences[chunk.sequence_id]
        return Part(sequence=sequence, start=chunk.start, tokens=chunk.tokens, samples=chunk.last, prompt=True, new=new)

    def _new_sequence(self, chunk: Chunk) -> ShardSequence:
        assert chunk.parameters is not None
        sequence = ShardSequence(
            sequence_id=chunk.sequence_id,
            parameters=chunk.parameters,
            birth=next(self._births),
            own_start=chunk.start,
            computed=chunk.start,
            penalties=PenaltyCounts() if chunk.parameters.sampling.penalizes else None,
        )
        if chunk.copy is not None:
            source = self._sequences[chunk.copy.source_id]
            sequence.extend(source.tokens[: chunk.copy.length])
            if self.backend.capacity.layout is KvLayout.UNIFIED:
                sequence.inherited = source.runs_up_to(chunk.copy.length)
            else:
                sequence.own_start = 0
        return sequence

    def _decode_parts(self, sequence_ids: Iterable[int]) -> list[Part]:
        parts = []
        for sequence_id in sequence_ids:
            sequence = self._sequences[sequence_id]
            if sequence.phase is Phase.RUNNING:
                parts.append(
                    Part(sequence=sequence, start=sequence.computed, tokens=sequence.tokens[-1:], samples=True)
                )
        return parts

    def _run(self, parts: list[Part], started_ns: int) -> StepResult | Refusal:
        batch = assemble(parts)
        forward_from = perf_counter_ns()
        outcome = self.backend.decode(batch)
        forward_ns = perf_counter_ns() - forward_from
        if outcome is DecodeOutcome.OK:
            sampling_from = perf_counter_ns()
            rows = self._commit(parts)
            sample_ns = perf_counter_ns() - sampling_from
            return StepResult(StepOutcome.OK, rows, _timings(started_ns, forward_ns, sample_ns))
        self._roll_back(parts)
        if outcome in _UNFINISHED:
            return StepResult(_UNFINISHED[outcome], TokenRows(), _timings(started_ns, forward_ns, 0))
        self.failures_in_a_row += 1
        _log.error("a forward pass failed", extra={"outcome": outcome.value, "in_a_row": self.failures_in_a_row})
        return Refusal(ShardError.FORWARD_FAILED, f"the forward pass failed ({outcome.value})")

    def _commit(self, parts: list[Part]) -> TokenRows:
        self.step_count += 1
        self.failures_in_a_row = 0
        for part in parts:
            if part.new:
                self._sequences[part.sequence.sequence_id] = part.sequence
            if part.prompt:
                part.sequence.extend(part.tokens)
            part.sequence.computed += len(part.tokens)
        sampled = [part.sequence for part in parts if part.samples]
        return sample_rows(sampled, self.backend, self._sampler) if sampled else TokenRows()

    def _roll_back(self, parts: list[Part]) -> None:
        for part in parts:
            sequence_id = part.sequence.sequence_id
            if part.new:
                self.backend.trim(sequence_id, 0)
            elif self.backend.length(sequence_id) != part.start and not self._cut_back(sequence_id, part.start):
                _log.error("a sequence could not be cut back and is lost", extra={"sequence": sequence_id})
                self._release([sequence_id])

    def _cut_back(self, sequence_id: int, length: int) -> bool:
        return self.backend.trim(sequence_id, length) and self.backend.length(sequence_id) == length


def _timings(started_ns: int, forward_ns: int, sample_ns: int) -> Timings:
    return Timings(forward_ns=forward_ns, sample_ns=sample_ns, total_ns=perf_counter_ns() - started_ns)
