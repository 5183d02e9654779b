"""The workloads: which prompts to send in which phases. The same seed always gives the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import assert_never

from caravan_serve.bench.request import BenchRequest

# Everyday words, each of which is one token in nearly every BPE vocabulary.
_TEXT = """
    able about above across action after again air all almost along already also always among animal answer apple area
    army around art autumn away back bad bank base beach bear beautiful bed before begin behind bell below best better
    between big bird black blue board boat body book both bottom box bread break bridge bright bring brother brown build
    burn business busy call camp capital care carry catch cause center chance change check child choose church circle
    city class clean clear climb clock close cloud coast cold color common complete cook cool copy corner cost cotton
    count country course cover cross crowd dance danger dark daughter day deep desert develop direct distance doctor
    door double down draw dream dress drive drop dry during early earth east easy edge electric else empty energy engine
    enough enter even evening every example eye face fact fall family famous farm fast father feel field fight figure
    fill find fine finger fire first fish floor flower follow food foot force forest form forward found fresh friend
    front fruit full game garden gate gentle glass gold good grand grass great green ground group grow guess half hand
    happy hard head hear heart heat heavy help high hill history hold home horse hospital hour house hundred ice idea
    inside island join journey just keep kind king kitchen knife know lake land language large last late laugh law lead
    learn leave left letter level light line listen little long machine market master matter measure meet middle mile
    milk mind minute money month moon morning mother mountain mouth move music name nation nature near night noise
    north note number ocean offer office often open orange order other paint paper parent part party pass past path
    pay people person picture piece place plain plan plant play point poor power press problem public pull question
    quick quiet rain reach ready reason record red rest rich ride right ring river road rock room round rule run safe
    sail salt same sand school science sea season second seed sell send sentence seven shape ship short silver simple
    sing sister size skin sleep slow small smile snow soft soil song south space speak spring square stand star start
    station step stone store story street strong student sugar summer sun surface table talk teacher test thing think
    time touch town track trade train travel tree true turn under valley village visit voice walk wall warm watch water
    weather week west wheel white wide wild wind window winter wish wood word work world write yard year yellow young
"""
ALL_WORDS = tuple(_TEXT.split())


def seeded(name: str) -> Random:
    """Return a random generator that depends only on ``name``."""
    return Random(name)  # noqa: S311 - must be repeatable, is not secret


def words(rng: Random, count: int) -> str:
    """Return ``count`` random words without punctuation."""
    return " ".join(rng.choices(ALL_WORDS, k=count))


class Workload(StrEnum):
    """The workloads by their names on the command line."""

    PLAIN = "plain"
    DECODE = "decode"
    SHARED_PREFIX = "shared-prefix"
    RETURNING_PREFIX = "returning-prefix"
    N = "n"
    STALL = "stall"
    OVERLOAD = "overload"
    AGENTS = "agents"


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
class LoadPhase:
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


def phases(workload: Workload, shape: Shape) -> tuple[LoadPhase, ...]:
    """Return the phases of a workload that has some: all except ``stall`` and ``agents``."""
    size = _sized(workload, shape)
    requests = shape.concurrency if size.requests is None else size.requests
    rng = _rng(workload, shape)
    match workload:
        case Workload.PLAIN | Workload.DECODE | Workload.OVERLOAD:
            return (LoadPhase(workload, _distinct(rng, size, requests)),)
        case Workload.N:
            sampled = tuple(
                BenchRequest(prompt=words(rng, size.words), max_tokens=size.tokens, n=shape.n) for _ in range(requests)
            )
            return (LoadPhase(workload, sampled),)
        case Workload.SHARED_PREFIX:
            prefixes = [words(rng, size.words)] * requests
            return tuple(LoadPhase(name, _continued(rng, prefixes, size)) for name in ("cold", "warm"))
        case Workload.RETURNING_PREFIX:
            # One request at a time, so that the time to the first token holds no waiting for other requests.
            prefixes = [words(rng, size.words) for _ in range(requests)]
            cold = LoadPhase("cold", _continued(rng, prefixes, size), 1)
            between = LoadPhase("between", _distinct(rng, _BETWEEN, shape.between))
            return (cold, between, LoadPhase("warm", _continued(rng, prefixes, size), 1))
        case Workload.STALL | Workload.AGENTS:
            message = f"the workload {workload} has no phases"
            raise AssertionError(message)
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
