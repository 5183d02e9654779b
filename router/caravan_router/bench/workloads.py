"""The workloads: which prompts are sent, in which phases. The same seed always gives the same prompts."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import assert_never

from caravan_router.bench.request import BenchRequest
from caravan_router.bench.words import seeded, words


class Workload(StrEnum):
    """Names as on the command line."""

    PLAIN = "plain"
    DECODE = "decode"
    SHARED_PREFIX = "shared-prefix"
    N = "n"
    STALL = "stall"
    OVERLOAD = "overload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a workload; None takes the workload's own default."""

    words: int | None = None
    tokens: int | None = None
    requests: int | None = None
    concurrency: int = 8
    n: int = 8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    """Requests that are reported together."""

    name: str
    requests: tuple[BenchRequest, ...]


@dataclass(frozen=True, slots=True)
class StallPlan:
    """Running streams, and the prompt that lands on them."""

    streams: tuple[BenchRequest, ...]
    intruder: BenchRequest


@dataclass(frozen=True, slots=True)
class _Defaults:
    words: int
    tokens: int
    requests: int | None
    """None: as many as the concurrency."""


_DEFAULTS = {
    Workload.PLAIN: _Defaults(100, 64, 64),
    # Long outputs after short prompts: what is left is the decode rate, to compare with a bare engine's.
    Workload.DECODE: _Defaults(16, 192, None),
    Workload.SHARED_PREFIX: _Defaults(600, 64, None),
    Workload.N: _Defaults(100, 64, 4),
    Workload.STALL: _Defaults(1500, 16, None),
    Workload.OVERLOAD: _Defaults(600, 64, 32),
}
_TAIL_WORDS = 30
_STALL_STREAMS = 4
# Long enough to outlive the intruder's prefill even where decoding goes on at full speed beside it.
_STALL_STREAM_TOKENS = 512


def phases(workload: Workload, shape: Shape) -> tuple[Phase, ...]:
    """What to send for any workload but ``stall``."""
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
            prefix = words(rng, size.words)
            return tuple(
                Phase(
                    name,
                    tuple(
                        BenchRequest(prompt=f"{prefix} {words(rng, _TAIL_WORDS)}", max_tokens=size.tokens)
                        for _ in range(requests)
                    ),
                )
                for name in ("cold", "warm")
            )
        case Workload.STALL:
            raise AssertionError("the stall workload has a plan of its own")
        case _:
            assert_never(workload)


def stall_plan(shape: Shape) -> StallPlan:
    """``shape.words`` and ``shape.tokens`` size the intruder."""
    size = _sized(Workload.STALL, shape)
    rng = _rng(Workload.STALL, shape)
    streams = _distinct(rng, _Defaults(_TAIL_WORDS, _STALL_STREAM_TOKENS, None), _STALL_STREAMS)
    return StallPlan(streams, BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens))


def warm_up(shape: Shape, count: int) -> tuple[BenchRequest, ...]:
    """Short requests that share nothing with the measured ones."""
    return _distinct(seeded(f"warm-up {shape.seed}"), _Defaults(_TAIL_WORDS, 8, None), count)


def _rng(workload: Workload, shape: Shape) -> Random:
    # The workload is part of the seed: runs against one server after another must not hit each other's cache.
    return seeded(f"{workload} {shape.concurrency} {shape.seed}")


def _sized(workload: Workload, shape: Shape) -> _Defaults:
    default = _DEFAULTS[workload]
    return _Defaults(
        default.words if shape.words is None else shape.words,
        default.tokens if shape.tokens is None else shape.tokens,
        default.requests if shape.requests is None else shape.requests,
    )


def _distinct(rng: Random, size: _Defaults, count: int) -> tuple[BenchRequest, ...]:
    return tuple(BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens) for _ in range(count))
