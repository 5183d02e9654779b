"""The workloads: which prompts to send in which phases. The same seed always gives the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import assert_never

from caravan_serve.bench.request import BenchRequest
from caravan_serve.bench.words import seeded, words


class Workload(StrEnum):
    """The workloads by their names on the command line."""

    PLAIN = "plain"
    DECODE = "decode"
    SHARED_PREFIX = "shared-prefix"
    RETURNING_PREFIX = "returning-prefix"
    N = "n"
    STALL = "stall"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a workload. None means the workload's own default. ``between`` is for returning prefixes only."""

    words: int | None = None
    tokens: int | None = None
    requests: int | None = None
    concurrency: int = 8
    n: int = 8
    between: int = 50
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are reported together. ``concurrency`` replaces the run's own, if it is set."""

    name: str
    requests: tuple[BenchRequest, ...]
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class StallPlan:
    """The streams to start, and the long prompt to send while they run."""

    streams: tuple[BenchRequest, ...]
    intruder: BenchRequest


@dataclass(frozen=True, slots=True)
class _Defaults:
    words: int
    tokens: int
    requests: int | None
    """None: as many requests as the concurrency."""


_DEFAULTS = {
    Workload.PLAIN: _Defaults(100, 64, 64),
    # Long outputs after short prompts measure little but decoding, to compare with the bare engine's rate.
    Workload.DECODE: _Defaults(16, 192, None),
    Workload.SHARED_PREFIX: _Defaults(600, 64, None),
    Workload.RETURNING_PREFIX: _Defaults(600, 8, 5),
    Workload.N: _Defaults(100, 64, 4),
    Workload.STALL: _Defaults(1500, 16, None),
    Workload.OVERLOAD: _Defaults(600, 64, 32),
}
_TAIL_WORDS = 30
_BETWEEN = _Defaults(100, 8, None)
_STALL_STREAMS = 4
# Enough to outlive the prefill of the long prompt, even if decoding continues at full speed beside it.
_STALL_STREAM_TOKENS = 512


def phases(workload: Workload, shape: Shape) -> tuple[Phase, ...]:
    """Return the phases of any workload but ``stall``."""
    size = _sized(workload, shape)
    requests = shape.concurrency if size.requests is None else size.requests
    rng = _rng(workload, shape)
    match workload:
        case Workload.PLAIN | Workload.DECODE | Workload.OVERLOAD:
            return (Phase(workload, _distinct(rng, size, requests)),)
        case Workload.N:
            sampled = tuple(
                BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens, n=shape.n) for _ in range(requests)
            )
            return (Phase(workload, sampled),)
        case Workload.SHARED_PREFIX:
            prefixes = [words(rng, size.words)] * requests
            return tuple(Phase(name, _continued(rng, prefixes, size)) for name in ("cold", "warm"))
        case Workload.RETURNING_PREFIX:
            # One request at a time, so that the time to the first token holds no waiting for other requests.
            prefixes = [words(rng, size.words) for _ in range(requests)]
            cold = Phase("cold", _continued(rng, prefixes, size), 1)
            between = Phase("between", _distinct(rng, _BETWEEN, shape.between))
            return (cold, between, Phase("warm", _continued(rng, prefixes, size), 1))
        case Workload.STALL:
            raise AssertionError("the workload `stall` has no phases: call `stall_plan`")
        case _:
            assert_never(workload)


def stall_plan(shape: Shape) -> StallPlan:
    """Return the plan of the workload ``stall``; ``shape.words`` and ``shape.tokens`` are the long prompt's sizes."""
    size = _sized(Workload.STALL, shape)
    rng = _rng(Workload.STALL, shape)
    streams = _distinct(rng, _Defaults(_TAIL_WORDS, _STALL_STREAM_TOKENS, None), _STALL_STREAMS)
    return StallPlan(streams, BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens))


def warm_up(shape: Shape, count: int) -> tuple[BenchRequest, ...]:
    """Return ``count`` short requests that share no prefix with the measured ones."""
    return _distinct(seeded(f"warm-up {shape.seed}"), _Defaults(_TAIL_WORDS, 8, None), count)


def _rng(workload: Workload, shape: Shape) -> Random:
    # The workload is part of the seed, so that several workloads on one server do not share cached prefixes.
    return seeded(f"{workload} {shape.concurrency} {shape.seed}")


def _sized(workload: Workload, shape: Shape) -> _Defaults:
    default = _DEFAULTS[workload]
    return _Defaults(
        default.words if shape.words is None else shape.words,
        default.tokens if shape.tokens is None else shape.tokens,
        default.requests if shape.requests is None else shape.requests,
    )


def _continued(rng: Random, prefixes: Sequence[str], size: _Defaults) -> tuple[BenchRequest, ...]:
    """Return one request for each prefix, with an end of its own."""
    return tuple(
        BenchRequest(prompt=f"{prefix} {words(rng, _TAIL_WORDS)}", max_tokens=size.tokens) for prefix in prefixes
    )


def _distinct(rng: Random, size: _Defaults, count: int) -> tuple[BenchRequest, ...]:
    return tuple(BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens) for _ in range(count))
