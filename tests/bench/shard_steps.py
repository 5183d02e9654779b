"""Measures where the time of a shard's steps goes: `python tests/bench/shard_steps.py MODEL [--split] [-ub N]`.

Needs no gRPC. Prints one line per number of sequences (decode) and one per size of the prompt chunk (prefill, with four
decoding sequences in the same step). ``--exact`` computes row by row. ``--record FILE`` writes the times for
`bench.simulate`.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter_ns

from caravan_proto.messages.commands import Chunk, Decode, FilterBatch, Prefill
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.config import ShardConfig
from caravan_shard.engine.engine import Engine
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.protocol.results import StepResult
from caravan_shard.sequences.runs import RunStore
from caravan_shard.service.loading import backend_loader

_MS = 1e6
_NS = 1e9


def _tokens(count: int, seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(100, 40_000) for _ in range(count)]


def _start(engine: Engine, sequence_id: int, prompt: Sequence[int], sampling: SamplingParams) -> None:
    parameters = PreparedParameters(
        sampling=sampling, prompt_length=len(prompt), max_length=len(prompt) + 500, ignore_eos=True
    )
    chunk = Chunk(sequence_id=sequence_id, start=0, token_ids=prompt, last=True, setup=parameters)
    assert isinstance(engine.prefill(Prefill(chunks=[chunk]), perf_counter_ns()), StepResult)


def _decode(engine: Engine, sequences: int, steps: int, sampling: SamplingParams, name: str) -> float:
    """Return the seconds of a step."""
    for sequence_id in range(sequences):
        _start(engine, sequence_id, _tokens(100, sequence_id), sampling)
    ids = list(range(sequences))
    assert engine.begin_decode(Decode(sequence_ids=ids, max_steps=steps)) is None
    inside, sampled, outside = [], [], []
    for _ in range(steps):
        started = perf_counter_ns()
        result = engine.decode_step(ids, started)
        wall = perf_counter_ns() - started
        assert isinstance(result, StepResult)
        inside.append(result.timings.forward_ns)
        sampled.append(result.timings.sample_ns)
        outside.append(wall - result.timings.forward_ns)
    share = 100 * sum(inside) / (sum(inside) + sum(outside))
    print(
        f"decode {sequences:3} x {name:9} forward {median(inside) / _MS:7.2f}, outside {median(outside) / _MS:6.3f} ms "
        f"(sampling {median(sampled) / _MS:6.3f}), {share:.2f} % inside"
    )
    engine.filter_batch(FilterBatch(keep=[]))
    return (median(inside) + median(outside)) / _NS


def _prefill(engine: Engine, chunk_tokens: int, riders: int, repeats: int) -> float:
    """Return the seconds of a step."""
    greedy = SamplingParams(temperature=0.0)
    for sequence_id in range(riders):
        _start(engine, sequence_id, _tokens(100, sequence_id), greedy)
    rider_ids = list(range(riders))
    prompt_id = riders
    parameters = PreparedParameters(sampling=greedy, prompt_length=1, max_length=1024)
    times = []
    for repeat in range(repeats):
        chunk = Chunk(
            sequence_id=prompt_id, start=0, token_ids=_tokens(chunk_tokens, repeat), last=True, setup=parameters
        )
        started = perf_counter_ns()
        result = engine.prefill(Prefill(chunks=[chunk], ride=rider_ids), started)
        times.append(perf_counter_ns() - started)
        assert isinstance(result, StepResult)
        engine.filter_batch(FilterBatch(keep=rider_ids))
    best = min(times) / _MS
    print(
        f"prefill {chunk_tokens:4} + {riders} riders: {median(times) / _MS:8.2f} ms (best {best:8.2f}), "
        f"{best / chunk_tokens:6.3f} ms per prompt token"
    )
    engine.filter_batch(FilterBatch(keep=[]))
    return median(times) / _NS


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--flash-attn", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("-ub", type=int, default=512)
    parser.add_argument("-t", type=int, default=2)
    parser.add_argument("--riders", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequences", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--chunks", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512])
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    config = ShardConfig(
        model=given.model,
        ctx_size=32 * 1024,
        parallel=32,
        kv_layout="split" if given.split or given.exact else "unified",
        exact=given.exact,
        flash_attn=given.flash_attn,
        ubatch_size=given.ub,
        threads=given.t,
    )
    engine = Engine(backend_loader(config)(), 1, RunStore(0))
    drawn = SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=7)
    full = SamplingParams(temperature=0.8, seed=7)
    decodes = {
        sequences: _decode(engine, sequences, given.steps, SamplingParams(temperature=0.0), "greedy")
        for sequences in sorted({*given.sequences, *([given.riders] if given.record else [])})
    }
    nucleus = SamplingParams(temperature=0.8, top_p=0.95, seed=7)
    logprobs = SamplingParams(temperature=0.0, logprobs=True, top_n_tokens=5)
    for name, sampling in (("topk+p", drawn), ("no filter", full), ("top-p", nucleus), ("logprobs", logprobs)):
        if 8 in given.sequences:
            _decode(engine, 8, given.steps, sampling, name)
    prefills = {tokens: _prefill(engine, tokens, given.riders, 3) for tokens in sorted(given.chunks)}
    engine.close()
    if given.record:
        prompt = [(0, 0.0), *((tokens, seconds - decodes[given.riders]) for tokens, seconds in prefills.items())]
        given.record.write_text(json.dumps({"decode": list(decodes.items()), "prompt": prompt}) + "\n")


if __name__ == "__main__":
    main()
