"""Measures what drafts are worth on one shard: `PYTHONPATH=tests python -m bench.draft_gain MODEL [--work quote ...]`.

Needs no gRPC. Decodes the same texts with and without drafts in turns, and prints tokens per second of processor time,
the gain, and which share that is of its bound: the gain if steps took the time of their forward passes alone, with as
many tokens. The workloads are those of `bench.draft_workloads`, and `predicted`: the plain outputs as predictions, of
which a share of the tokens is wrong. Of `copier`, the figures of the copier and of its neighbours stand apart. With a
draft model (`-md FILE`), whose time counts, the bound is that of drafts that take no time.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter_ns, process_time

from bench.draft_workloads import Job, Workloads
from caravan_proto.messages.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_proto.messages.results import DraftSource
from caravan_shard.config import ShardConfig
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loading import backend_loader

_WORK = ("chat", "quote", "edit", "json", "predicted", "copier")
_WRONG = (0.0, 0.05, 0.1, 0.3)
# A copier gets several tokens in a step, while its neighbours get one.
_COPIES = 5


@dataclass(kw_only=True)
class Measured:
    """The outputs of one run, and what they took."""

    outputs: list[list[int]]
    seconds: float = 0.0
    forward_s: float = 0.0
    # Seconds of forward passes by the number of their tokens.
    passes: dict[int, list[float]] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    # Those of the draft model.
    model_drafted: int = 0
    model_accepted: int = 0

    @property
    def counts(self) -> list[int]:
        """Tokens of each output, without the first one, which the prefill sampled."""
        return [len(output) - 1 for output in self.outputs]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of processor time, of each sequence."""
        return [count / self.seconds for count in self.counts]

    @property
    def rate(self) -> float:
        """Tokens per second of processor time, of all sequences."""
        return sum(self.rates)

    @property
    def forward_rate(self) -> float:
        """Tokens per second of forward passes."""
        return sum(self.counts) / self.forward_s


class Bench:
    """Decodes jobs on one engine."""

    def __init__(self, engine: Engine, given: argparse.Namespace) -> None:
        self._engine = engine
        self._given = given

    def compare(self, name: str, jobs: Sequence[Job], wrong: float | None = None, longest: int = 1) -> None:
        """Print the gain of drafts: the best of the rounds of each.

        ``wrong``: the share of tokens of a prediction that are wrong; None without one. ``longest``: a run ends when
        all outputs have ``--tokens``, and none has more than so many times ``--tokens``.
        """
        plain = self._run(jobs, longest, 0)
        if wrong is not None:
            source = random.Random(1)
            jobs = [
                replace(
                    job,
                    predicted=tuple(
                        source.randrange(99, 999) if source.random() < wrong else token for token in output
                    ),
                )
                for job, output in zip(jobs, plain.outputs, strict=True)
            ]
        with_drafts, without = [], []
        for _ in range(self._given.rounds):
            with_drafts.append(self._run(jobs, longest, self._given.speculate))
            without.append(self._run(jobs, longest, 0))
        _print(name, with_drafts, without)

    def _run(self, jobs: Sequence[Job], longest: int, speculate: int) -> Measured:
        """Decode all jobs together."""
        engine, new_tokens = self._engine, self._given.tokens
        found = Measured(outputs=[])
        for number, job in enumerate(jobs):
            parameters = PreparedParameters(
                sampling=job.sampling,
                prompt_length=len(job.prompt),
                max_length=len(job.prompt) + longest * new_tokens,
                ignore_eos=job.grammar is None,
                grammar=job.grammar,
                max_draft_tokens=speculate,
                prediction=job.predicted,
            )
            chunk = Chunk(sequence_id=number, start=0, token_ids=job.prompt, last=True, setup=parameters)
            result = engine.prefill(Prefill(chunks=[chunk]), perf_counter_ns())
            assert isinstance(result, StepResult)
            found.outputs.append(list(result.rows.token_ids))
        ids = list(range(len(jobs)))
        most = min(engine.backend.capacity.max_draft_tokens, speculate * len(jobs)) if speculate else 0
        refusal = engine.begin_decode(Decode(sequence_ids=ids, max_steps=new_tokens, max_draft_tokens=most))
        assert refusal is None
        began = process_time()
        while longest == 1 or min(map(len, found.outputs)) < new_tokens:
            step = engine.decode_step(ids, perf_counter_ns(), DraftBudget(most, new_tokens))
            if step is None:
                break
            assert isinstance(step, StepResult)
            _add(found, step)
        found.seconds = process_time() - began
        engine.filter_batch(FilterBatch(keep=[]))
        return found


def _add(found: Measured, step: StepResult) -> None:
    running = set(step.rows.sequence_ids)
    for sequence_id, token in zip(step.rows.sequence_ids, step.rows.token_ids, strict=True):
        found.outputs[sequence_id].append(token)
    size = len(running)
    if step.drafts is not None:
        found.drafted += sum(step.drafts.drafted)
        found.accepted += sum(step.drafts.accepted)
        size += sum(step.drafts.drafted)
        for source, drafted, accepted in zip(
            step.drafts.sources, step.drafts.drafted, step.drafts.accepted, strict=True
        ):
            if source is DraftSource.MODEL:
                found.model_drafted += drafted
                found.model_accepted += accepted
    seconds = step.timings.forward_ns / 1e9
    found.forward_s += seconds
    found.passes.setdefault(size, []).append(seconds)


def _print(name: str, with_drafts: Sequence[Measured], without: Sequence[Measured]) -> None:
    best, plain = max(with_drafts, key=lambda one: one.rate), max(without, key=lambda one: one.rate)
    gain = best.rate / plain.rate
    bound = max(one.forward_rate for one in with_drafts) / max(one.forward_rate for one in without)
    same = sum(one == other for one, other in zip(best.outputs, plain.outputs, strict=True))
    print(
        f"{name:14} x {len(best.outputs):2}: {plain.rate:7.1f} -> {best.rate:7.1f} tokens/s, {gain:.3f} times, "
        f"{gain / bound:.3f} of the bound; accepted {best.accepted} of {best.drafted}, "
        f"of a draft model {best.model_accepted} of {best.model_drafted}; "
        f"{same} of {len(best.outputs)} texts equal",
        flush=True,
    )
    if name == "copier":
        times = [rate / plain_rate for rate, plain_rate in zip(best.rates, plain.rates, strict=True)]
        print(
            f"{'':14}    the copier {times[0]:.3f} times, its neighbours {min(times[1:]):.3f} to {max(times[1:]):.3f}"
        )
    table = {size: median(seconds) for size, seconds in sorted((best.passes | plain.passes).items())}
    print(f"{'':14}    ms by tokens: {', '.join(f'{size}: {1000 * one:.1f}' for size, one in table.items())}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("-md", "--model-draft", default="")
    parser.add_argument("--work", nargs="*", choices=_WORK, default=_WORK)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--flash-attn", default="auto")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 8, 32])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", type=int, default=1)
    given = parser.parse_args()
    config = ShardConfig(
        model=given.model,
        model_draft=given.model_draft,
        ctx_size=32 * 1024,
        parallel=max(given.streams),
        kv_layout="split" if given.split else "unified",
        flash_attn=given.flash_attn,
        threads=given.t,
    )
    engine = Engine(backend_loader(config)(), 1, RunStore(0))
    bench, workloads = Bench(engine, given), Workloads(engine.backend)
    makers = {
        "chat": workloads.chat,
        "quote": workloads.quote,
        "edit": workloads.edit,
        "json": workloads.json,
        "copier": workloads.copier,
    }
    for streams in given.streams:
        for kind in given.work:
            if kind == "predicted":
                for wrong in _WRONG:
                    bench.compare(f"predicted -{wrong}", workloads.chat(streams), wrong)
            elif kind == "copier":
                if streams > 1:
                    bench.compare(kind, workloads.copier(streams), longest=_COPIES)
            else:
                bench.compare(kind, makers[kind](streams))
    engine.close()


if __name__ == "__main__":
    main()
