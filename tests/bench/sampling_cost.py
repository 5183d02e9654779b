"""Measures the CPU time of choosing a token, by vocabulary, rows of a step and parameters. Not run by the test suite.

``PYTHONPATH=tests python -m bench.sampling_cost``: needs no model. Logits are random: ``flat`` ones as those of a model
of random weights, ``peaked`` ones as those of a trained model, where few tokens are likely. A sequence with a mask may
have half of the vocabulary, as inside a JSON string, or 300 tokens, as between two fields. Prints CPU microseconds per
row, best of ``--repeats``.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time_ns
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.joint_draw import find_joint_draw
from caravan_shard.backends.llama.kernels.joint_logprobs import find_joint_logprobs
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.constraints.matching import Matching
from caravan_shard.engine.token_rows import sample_rows
from caravan_shard.protocol.commands import PreparedParameters
from caravan_shard.sampling.joint_draw import leave_all
from caravan_shard.sampling.logprobs import leave_all_logprobs
from caravan_shard.sampling.penalties import make_biases, make_penalties
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.sequences.sequence import Phase
from caravan_shard.sequences.sequence import Sequence as ShardSequence

if TYPE_CHECKING:
    from caravan_shard.backends.base import Backend
    from caravan_shard.constraints.grammar import Grammar

_PROMPT = 300
# Different logits for each step, so that no step finds its logits in a cache because the one before read them.
_STEPS = 4
_CHAIN: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked for. ``mask``: how many tokens a constraint allows, as a share or a number; None without one."""

    fields: dict[str, Any]
    mask: float | None = None


WORKS = {
    "greedy": Work({"temperature": 0.0}),
    "sampled": Work(_CHAIN),
    "top_p 0.95": Work({"temperature": 0.8, "top_p": 0.95}),
    "min_p 0.05": Work({"temperature": 0.8, "min_p": 0.05}),
    "no filter": Work({"temperature": 0.8}),
    "greedy, 5 logprobs": Work({"temperature": 0.0, "logprobs": True, "top_n_tokens": 5}),
    "sampled, 5 logprobs": Work(_CHAIN | {"logprobs": True, "top_n_tokens": 5}),
    "sampled, penalties": Work(_CHAIN | {"repetition_penalty": 1.1, "frequency_penalty": 0.2}),
    "sampled, biases": Work(_CHAIN | {"biases": ((7, -2.0), (90, 1.0))}),
    "sampled, DRY": Work(_CHAIN | {"dry_multiplier": 0.8}),
    "sampled, XTC": Work(_CHAIN | {"xtc_probability": 0.5}),
    "typical_p 0.9": Work({"temperature": 0.8, "top_k": 40, "typical_p": 0.9}),
    "greedy, mask of half": Work({"temperature": 0.0}, 0.5),
    "sampled, mask of half": Work(_CHAIN, 0.5),
    "greedy, mask of 300": Work({"temperature": 0.0}, 300),
    "sampled, mask of 300": Work(_CHAIN, 300),
}


class _Mask:
    """Plays llguidance's matcher, and the grammar that starts it: allows the same tokens at each place."""

    eog_ids = (0,)

    def __init__(self, vocabulary_size: int, allowed: float) -> None:
        self.vocabulary_size = vocabulary_size
        random = np.random.default_rng(1)
        kept = random.random(vocabulary_size) < (allowed if allowed < 1 else allowed / vocabulary_size)
        self._bits = np.packbits(kept, bitorder="little").tobytes()

    def start(self) -> "_Mask":
        return self

    def compute_bitmask(self) -> bytes:
        return self._bits

    def consume_tokens(self, tokens: Sequence[int]) -> None:
        pass

    def consume_token(self, token: int) -> None:
        pass

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _Piece:
    data: bytes = b"abc"
    special: bool = False


class _Facts:
    eos_token_ids = frozenset({2})


class _Vocabulary:
    def piece(self, _token: int) -> _Piece:
        return _PIECE


_PIECE = _Piece()


class _Backend:
    """What `sample_rows` asks of a backend."""

    facts = _Facts()
    vocabulary = _Vocabulary()


def logits_of(kind: str, rows: int, size: int) -> Floats:
    """Return logits [rows, size]: ``flat`` or ``peaked``."""
    random = np.random.default_rng(size)
    normal = random.standard_normal((rows, size), np.float32)
    if kind == "flat":
        return normal
    ranks = np.stack([random.permutation(size) for _ in range(rows)])
    peaked: Floats = (2 * normal - 2.5 * np.log(ranks + 1.0)).astype(np.float32)
    return peaked


def _sequence(number: int, work: Work, size: int) -> ShardSequence:
    sampling = SamplingParams(seed=number, **work.fields)
    parameters = PreparedParameters(
        sampling=sampling, prompt_length=_PROMPT, max_length=10**9, ignore_eos=work.mask is None
    )
    random = np.random.default_rng(number)
    sequence = ShardSequence(sequence_id=number, parameters=parameters, birth=number, phase=Phase.RUNNING)
    sequence.penalties = make_penalties(sampling, lambda _token: b"abc")
    sequence.biases = make_biases(sampling.biases)
    sequence.extend(random.integers(3, size, _PROMPT).tolist())
    if work.mask is not None:
        sequence.matching = Matching(cast("Grammar", _Mask(size, work.mask)))
    return sequence


def cost(work: Work, logits: Floats, sampler: Sampler, repeats: int) -> float:
    """Return the CPU microseconds of a row. ``logits`` [rows and a few, vocabulary]: those of one step per shift."""
    rows, size = len(logits) - _STEPS, logits.shape[1]
    sequences = [_sequence(number, work, size) for number in range(rows)]
    backend = cast("Backend", _Backend())

    def step(shift: int) -> None:
        for sequence in sequences:
            if sequence.matching is not None:
                sequence.matching.find(sequence.tokens[_PROMPT:])
        sample_rows(sequences, logits[shift : shift + rows], backend, sampler)

    steps = max(2, 60 // rows)
    return min(_cpu_us(step, steps) for _ in range(repeats)) / rows


def _cpu_us(step: Callable[[int], None], steps: int) -> float:
    started = process_time_ns()
    for number in range(steps):
        step(number % _STEPS)
    return (process_time_ns() - started) / steps / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="sampling_cost", description=__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 152_064, 262_144])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--logits", nargs="+", choices=("flat", "peaked"), default=["flat", "peaked"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="take each row alone, as builds without draw_rows.c do")
    given = parser.parse_args()
    print("| vocabulary | logits | rows |", " | ".join(given.works), "|")
    print("|---:|---|---:|" + "---:|" * len(given.works))
    draw = leave_all if given.alone else find_joint_draw(1)
    logprobs = leave_all_logprobs if given.alone else find_joint_logprobs()
    for size in given.vocabularies:
        sampler = Sampler(LlamaFilter(size), 1, draw, logprobs)
        for kind in given.logits:
            logits = logits_of(kind, max(given.rows) + _STEPS, size)
            for rows in given.rows:
                costs = [cost(WORKS[name], logits[: rows + _STEPS], sampler, given.repeats) for name in given.works]
                print(f"| {size} | {kind} | {rows} |", " | ".join(f"{us:.0f}" for us in costs), "|", flush=True)


if __name__ == "__main__":
    main()
