"""Runs the rows: each round loads all servers of a lineup in turn, and then measures the bare engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby

from bench.bounds import Attention, engine_time
from bench.contenders import Common, Contender, Product
from bench.figures import failures, mean_prompt_tokens
from bench.fleet import Fleet, Load, fleet
from bench.load import busy_neighbours
from bench.rows import Profile, Row
from bench.summary import Round, RowResult, turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. ``peers`` are the names of the peers to compare with; None means all."""

    rows: tuple[Row, ...]
    profile: Profile
    peers: tuple[str, ...] | None
    seed: int


def measure(plan: Plan, common: Common) -> Iterator[list[RowResult]]:
    """Measure one model. Yield the results so far after each round."""
    results: list[RowResult] = []
    # Each round takes the next seed, so that no prompt repeats between rounds or rows.
    seeds = count(plan.seed)
    for whole, rows in groupby(plan.rows, key=lambda row: row.lineup):
        lineup = whole if plan.peers is None else whole.only(plan.peers)
        print(f"starting {', '.join(contender.name for contender in (lineup.ours, *lineup.peers))}", flush=True)
        with fleet(lineup, common) as servers:
            print(f"ageing each with {plan.profile.age_prompts} unrelated prompts", flush=True)
            servers.age(plan.profile, lineup.api, next(seeds))
            for row in rows:
                result = RowResult(row=row, lineup=lineup)
                results.append(result)
                for number in range(min(plan.profile.rounds, row.most_rounds or plan.profile.rounds)):
                    print(f"{row.name}, round {number + 1}", flush=True)
                    groups = _loads(result, number, servers, plan.profile.between, next(seeds))
                    result.rounds.append(_with_engine(groups, result, common))
                    yield results


def _loads(result: RowResult, number: int, servers: Fleet, between: int, seed: int) -> tuple[dict[str, Load], ...]:
    """Load all servers of the row with the same prompts, one after the other."""
    row, lineup = result.row, result.lineup
    arguments = (*row.arguments, "--between", str(between))
    with busy_neighbours(row.busy):
        return tuple(
            {contender.name: _load(contender, row, servers, arguments, seed) for contender in group}
            for group in turns(lineup.ours, lineup.peers, number)
        )


def _load(contender: Contender, row: Row, servers: Fleet, arguments: Sequence[str], seed: int) -> Load:
    print(f"  {contender.name}: ", end="", flush=True)
    if contender.product is Product.CARAVAN:
        arguments = (*arguments, *row.caravan_arguments)
    load = servers.load(contender, arguments, seed)
    values = [figure.read(load.report) for figure in row.figures]
    print(", ".join("-" if value is None else f"{value:,.1f}" for value in values), flush=True)
    for message in failures(load.report):
        print(f"    failed: {message}", flush=True)
    return load


def _with_engine(groups: tuple[dict[str, Load], ...], result: RowResult, common: Common) -> Round:
    """Add the times of the bare engine that the bounds of the row need."""
    ours = result.lineup.ours
    reports = [group[ours.name].report for group in groups]
    prompt_tokens = next(filter(None, map(mean_prompt_tokens, reports)), None)
    bounds = [figure.bound for figure in result.row.figures if figure.bound is not None]
    parts = [] if prompt_tokens is None else [part for bound in bounds for part in bound(prompt_tokens).parts]
    runs = {part.run for part in parts}
    engine = {
        attention: {run: engine_time(common, run, ours.cells, attention) for run in runs} for attention in Attention
    }
    return Round(groups=groups, prompt_tokens=prompt_tokens, engine=engine)
