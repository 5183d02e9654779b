"""Summarises the rounds of a row: medians, ratios of neighbours in time, shares of the bound."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from bench.bounds import Engine
from bench.contenders import Contender, Lineup
from bench.figures import Better, Figure
from bench.fleet import Load
from bench.rows import Row

T = TypeVar("T")


def turns(ours: T, peers: Sequence[T], round_number: int) -> list[list[T]]:
    """Return the loads of a round in their order, in groups in which ours is next to every peer.

    Every other round runs backwards: with one peer, the order is A B B A A B.
    """
    groups = [[ours, *peers]]
    if len(peers) > 1:
        groups = [[pair[0], ours, *pair[1:]] for pair in (peers[at : at + 2] for at in range(0, len(peers), 2))]
    return groups if round_number % 2 == 0 else [group[::-1] for group in reversed(groups)]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and the lowest and the highest of them."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of ``values``; None if there are none."""
    return Spread(median(values), min(values), max(values)) if values else None


def ratios(pairs: Sequence[tuple[float | None, float | None]]) -> list[float]:
    """Return the first value of each pair divided by the second, without pairs that lack one."""
    return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The loads of a round in their order, in groups of neighbours by name, and the bare engine's times.

    ``prompt_tokens`` is the mean length of the prompts that our server got; None if it is unknown.
    """

    groups: tuple[dict[str, Load], ...]
    prompt_tokens: int | None
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """All rounds of a row so far."""

    row: Row
    lineup: Lineup
    rounds: list[Round] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure of a row, compared with ``peer``; None stands for what was not measured."""

    label: str
    ours: Spread | None
    peer: str | None
    theirs: Spread | None
    ratio: Spread | None
    bound: Spread | None
    share: Spread | None


def summarise(result: RowResult) -> list[Line]:
    """Return one line for each figure. The peer is the one that is best in the first figure."""
    best = _best_peer(result)
    return [_line(result, figure, best) for figure in result.row.figures]


def _best_peer(result: RowResult) -> Contender | None:
    main = result.row.figures[0]
    medians = [(spread(_values(result, main, peer.name)), peer) for peer in result.lineup.peers]
    known = [(found.median, peer) for found, peer in medians if found is not None]
    choose = max if main.better is Better.HIGHER else min
    return choose(known, key=lambda pair: pair[0])[1] if known else None


def _line(result: RowResult, figure: Figure, peer: Contender | None) -> Line:
    ours = result.lineup.ours.name
    pairs = []
    if peer is not None:
        groups = [group for round_ in result.rounds for group in round_.groups if peer.name in group]
        pairs = [(figure.read(group[ours].report), figure.read(group[peer.name].report)) for group in groups]
    bounds = [_bound(figure, round_) for round_ in result.rounds]
    rates = [_round_value(figure, round_, ours) for round_ in result.rounds]
    return Line(
        label=f"{result.row.title}: {figure.label}",
        ours=spread(_values(result, figure, ours)),
        peer=None if peer is None else peer.name,
        theirs=None if peer is None else spread(_values(result, figure, peer.name)),
        ratio=spread(ratios(pairs)),
        bound=spread([bound for bound in bounds if bound is not None]),
        share=spread(ratios(list(zip(rates, bounds, strict=True)))),
    )


def _bound(figure: Figure, round_: Round) -> float | None:
    if figure.bound is None or round_.prompt_tokens is None:
        return None
    return figure.bound(round_.prompt_tokens).tokens_per_s(round_.engine)


def _round_value(figure: Figure, round_: Round, name: str) -> float | None:
    values = [figure.read(group[name].report) for group in round_.groups if name in group]
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _values(result: RowResult, figure: Figure, name: str) -> list[float]:
    loads = [group[name] for round_ in result.rounds for group in round_.groups if name in group]
    values = [figure.read(load.report) for load in loads]
    return [value for value in values if value is not None]
