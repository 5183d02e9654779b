"""Measures what drafts are worth on one shard: `PYTHONPATH=tests python -m bench.draft_gain MODEL [--work quote ...]`.

Needs no gRPC. Decodes the same texts with and without drafts in turns, and prints tokens per second of processor time,
the gain, and which share that is of its bound: the gain if steps took the time of their forward passes alone, with as
many tokens. The workloads are those of `Workloads`, and `predicted`: the plain outputs as predictions, of
which a share of the tokens is wrong. Of `copier`, the figures of the copier and of its neighbours stand apart. With a
draft model (`-md FILE`), whose time counts, the bound is that of drafts that take no time.
"""

import argparse
import colorsys
import fnmatch
import inspect
import json
import pydoc_data.topics
import random
import shlex
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter_ns, process_time
from typing import Any

from caravan_proto.messages.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.results import DraftSource
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import Backend
from caravan_shard.config import ShardConfig
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loading import backend_loader
from caravan_testing.shard_builders import Grammars

_GREEDY = SamplingParams(temperature=0.0)
_QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Give me three ideas for a birthday party.",
    "What is the difference between a list and a tuple?",
    "Describe your favourite season.",
    "How do I cook rice?",
    "Plan a day in a small town by the sea.",
)
# Functions of the standard library, each with a name in it that is to be replaced.
_FUNCTIONS: tuple[tuple[Callable[..., Any], str], ...] = (
    (colorsys.rgb_to_hls, "rangec"),
    (textwrap.indent, "predicate"),
    (fnmatch.filter, "normcase"),
    (shlex.join, "split_command"),
    (statistics.fmean, "weights"),
    (colorsys.rgb_to_hsv, "maxc"),
    (colorsys.hls_to_rgb, "m1"),
    (textwrap.shorten, "placeholder"),
)
# So many letters of the output are in the prompt. Small models copy only what they have begun to copy.
_BEGUN = 150
_NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gail", "Hugo")
_CITIES = ("Lisbon", "Prague", "Turin", "Vienna")
_RECORD = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 100, "maximum": 999},
        "name": {"type": "string", "maxLength": 12},
        "city": {"type": "string", "maxLength": 12},
        "is_active": {"type": "boolean"},
        "balance_in_cents": {"type": "integer", "minimum": 0, "maximum": 99_999},
    },
    "required": ["id", "name", "city", "is_active", "balance_in_cents"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt, how its tokens are chosen, and what its client predicts."""

    prompt: Sequence[int]
    sampling: SamplingParams
    grammar: Grammar | None = None
    predicted: tuple[int, ...] = ()


class Workloads:
    """Makes the jobs of each workload."""

    def __init__(self, backend: Backend) -> None:
        self._vocabulary = backend.vocabulary
        self._grammars = Grammars(backend)

    def chat(self, streams: int) -> list[Job]:
        """Return sampled answers to questions, which seldom repeat anything."""
        sampling = [SamplingParams(temperature=0.8, seed=number) for number in range(streams)]
        return [self._job(_QUESTIONS[number % 8], one) for number, one in enumerate(sampling)]

    def quote(self, streams: int, letters: int = 1200) -> list[Job]:
        """Return texts that are to be repeated word by word."""
        texts = [str(text)[:letters] for text in pydoc_data.topics.topics.values()]
        return [self._job(f"Repeat this text word by word:\n\n{text}", reply=text[:_BEGUN]) for text in texts[:streams]]

    def edit(self, streams: int) -> list[Job]:
        """Return functions in which a name is to be replaced."""
        jobs = []
        for number in range(streams):
            function, name = _FUNCTIONS[number % len(_FUNCTIONS)]
            source = inspect.getsource(function)
            request = f"Rename `{name}` to `other_{name}` in this function, and print the whole function:\n\n"
            signature, _, _ = source.partition("\n")
            jobs.append(self._job(f"{request}```python\n{source}```", reply=f"```python\n{signature}\n"))
        return jobs

    def json(self, streams: int) -> list[Job]:
        """Return records that are to be printed again with one change, with their JSON schema as the constraint."""
        jobs = []
        for number in range(streams):
            source = random.Random(number)
            records = [
                {
                    "id": source.randrange(100, 1000),
                    "name": name,
                    "city": source.choice(_CITIES),
                    "is_active": source.random() < 0.5,
                    "balance_in_cents": source.randrange(100_000),
                }
                for name in source.sample(_NAMES, 5)
            ]
            changed = records[2]["name"]
            request = f"Print these records as JSON again, but set the city of {changed} to Oslo:\n\n"
            schema = {"type": "array", "items": _RECORD, "minItems": len(records), "maxItems": len(records)}
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema))
            jobs.append(self._job(request + json.dumps(records), grammar=self._grammars.compile(constraint)))
        return jobs

    def copier(self, streams: int) -> list[Job]:
        """Return one long text to be repeated, among answers to questions."""
        return [*self.quote(1, letters=2400), *self.chat(streams)[1:]]

    def _job(
        self, request: str, sampling: SamplingParams = _GREEDY, *, grammar: Grammar | None = None, reply: str = ""
    ) -> Job:
        """``reply``: how the output begins."""
        prompt = f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n{reply}"
        tokens = self._vocabulary.tokenize(prompt, add_special=True, parse_special=True)
        return Job(prompt=tokens, sampling=sampling, grammar=grammar)


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
