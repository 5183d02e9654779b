"""Runs many constrained sequences through one engine; a new one starts as soon as one has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

from caravan_proto.messages.commands import Chunk, Decode, Header, Prefill
from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import Backend
from caravan_shard.constraints.grammar import Grammar, Problem, make_matcher
from caravan_shard.constraints.tokenizer import TokenTable, make_tokenizer
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import StepResult


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
