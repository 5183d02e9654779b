"""Measures what drafts are worth on one shard: `python tests/bench/draft_gain.py MODEL [--split] [--streams N ...]`.

Needs no gRPC. Decodes the same texts with and without drafts in turns, and prints tokens per second of processor time:
`chat` (questions, which seldom repeat themselves), `quote` (a text that is to be repeated), and `predicted`: the plain
outputs as predictions, of which a share of the tokens is wrong.
"""

import argparse
import pydoc_data.topics
import random
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns, process_time

from caravan_shard.config import ShardConfig
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_shard.protocol.results import StepResult
from caravan_shard.protocol.sequence_parameters import SequenceParameters
from caravan_shard.sampling.parameters import SamplingParameters
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loading import backend_loader

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


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt, how its tokens are chosen, and what its client predicts."""

    prompt: Sequence[int]
    sampling: SamplingParameters
    predicted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The outputs, the tokens per second of processor time, and the parts of draft tokens that were accepted."""

    outputs: list[list[int]]
    tokens_per_s: float
    drafted: int
    accepted: int


def _run(engine: Engine, jobs: Sequence[Job], new_tokens: int, speculate: int) -> Measured:
    """Decode all jobs together."""
    outputs: list[list[int]] = []
    for number, job in enumerate(jobs):
        parameters = SequenceParameters(
            sampling=job.sampling,
            prompt_length=len(job.prompt),
            max_length=len(job.prompt) + new_tokens,
            ignore_eos=True,
            max_draft_tokens=speculate,
            predicted=job.predicted,
        )
        chunk = Chunk(sequence_id=number, start=0, tokens=job.prompt, last=True, parameters=parameters)
        result = engine.prefill(Prefill(chunks=[chunk]), perf_counter_ns())
        assert isinstance(result, StepResult)
        outputs.append(list(result.rows.token_ids))
    ids = list(range(len(jobs)))
    most = min(engine.backend.capacity.max_draft_tokens, speculate * len(jobs)) if speculate else 0
    assert engine.begin_decode(Decode(sequence_ids=ids, max_steps=new_tokens, max_draft_tokens=most)) is None
    drafted = accepted = 0
    began = process_time()
    while True:
        step = engine.decode_step(ids, perf_counter_ns(), DraftBudget(most, new_tokens))
        if step is None:
            break
        assert isinstance(step, StepResult)
        for sequence_id, token in zip(step.rows.sequence_ids, step.rows.token_ids, strict=True):
            outputs[sequence_id].append(token)
        if step.drafts is not None:
            drafted += sum(step.drafts.drafted)
            accepted += sum(step.drafts.accepted)
    seconds = process_time() - began
    engine.filter_batch(FilterBatch(keep_ids=[]))
    tokens = sum(map(len, outputs)) - len(jobs)
    return Measured(outputs=outputs, tokens_per_s=tokens / seconds, drafted=drafted, accepted=accepted)


def _jobs(engine: Engine, kind: str, streams: int) -> list[Job]:
    vocabulary = engine.backend.vocabulary
    texts = [str(text) for text in pydoc_data.topics.topics.values()]
    jobs = []
    for number in range(streams):
        question = _QUESTIONS[number % len(_QUESTIONS)]
        if kind == "quote":
            question = f"Repeat this text word by word:\n\n{texts[number][:1200]}"
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        sampling = SamplingParameters() if kind == "quote" else SamplingParameters(temperature=0.8, seed=number)
        jobs.append(Job(prompt=vocabulary.tokenize(prompt, add_special=True, parse_special=True), sampling=sampling))
    return jobs


def _compare(engine: Engine, name: str, jobs: Sequence[Job], given: argparse.Namespace, wrong: float | None) -> None:
    """Print the gain of drafts: the best of the rounds of each."""
    plain = _run(engine, jobs, given.tokens, 0)
    if wrong is not None:
        source = random.Random(1)
        jobs = [
            Job(
                prompt=job.prompt,
                sampling=job.sampling,
                predicted=tuple(source.randrange(99, 999) if source.random() < wrong else token for token in output),
            )
            for job, output in zip(jobs, plain.outputs, strict=True)
        ]
    with_drafts, without = [], [plain]
    for _ in range(given.rounds):
        with_drafts.append(_run(engine, jobs, given.tokens, given.speculate))
        without.append(_run(engine, jobs, given.tokens, 0))
    best = max(one.tokens_per_s for one in with_drafts)
    plainest = max(one.tokens_per_s for one in without)
    last = with_drafts[-1]
    same = sum(one == other for one, other in zip(last.outputs, plain.outputs, strict=True))
    print(
        f"{name:14} x {len(jobs):2}: {plainest:7.1f} -> {best:7.1f} tokens/s, {best / plainest:.3f} times; "
        f"accepted {last.accepted} of {last.drafted}; {same} of {len(jobs)} texts equal"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 8, 32])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--speculate", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-t", type=int, default=1)
    given = parser.parse_args()
    config = ShardConfig(
        model=given.model,
        ctx_size=32 * 1024,
        parallel=32,
        kv_layout="split" if given.split else "unified",
        threads=given.t,
    )
    engine = Engine(backend_loader(config)(), 1, RunStore(0))
    for streams in given.streams:
        for kind in ("chat", "quote"):
            jobs = _jobs(engine, kind, streams)
            _compare(engine, kind, jobs, given, None)
            if kind == "chat":
                for wrong in (0.0, 0.1, 0.3):
                    _compare(engine, f"predicted -{wrong}", jobs, given, wrong)
    engine.close()


if __name__ == "__main__":
    main()
