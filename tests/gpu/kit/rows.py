"""Measures Caravan in pairs with llama-server, as `make bench` does: streams of 1, 8 and 32 clients."""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.contenders import Common, Contender, Lineup, Product
from bench.measure import Plan, measure
from bench.rows import OVERHEAD_ROWS, Profile, Row
from bench.summary import RowResult, summarise
from gpu.kit.job import Job, keep, kept, run_stage
from gpu.kit.models import MEASURED, model_file

from caravan_shard.backends.llama.devices.devices import first_devices

DEFAULT, DEVICE_SAMPLING = "llama-server", "llama-server -bs"
_FLAGS = {DEFAULT: (), DEVICE_SAMPLING: ("--backend-sampling",)}
# Cells, buffers and what the driver keeps, of each server; a guess from above.
_BESIDE_WEIGHTS_BYTES = 5 << 30


def lineup(slots: int, cells: int, peers: tuple[str, ...]) -> Lineup:
    """Return Caravan and ``peers``, each with its defaults beside slots and cells."""
    ours = Contender(name="Caravan", product=Product.CARAVAN, slots=slots, cells=cells)
    return Lineup(
        ours,
        tuple(
            Contender(name=name, product=Product.LLAMA_SERVER, slots=slots, cells=cells, flags=_FLAGS[name])
            for name in peers
        ),
    )


def peer_groups(model: Path) -> Iterator[tuple[str, ...]]:
    """Return which peers are resident beside Caravan: both, or one after the other if the card is too small."""
    needed = (1 + len(_FLAGS)) * (model.stat().st_size + _BESIDE_WEIGHTS_BYTES)
    devices = first_devices()
    if not devices or needed <= devices[0].total_bytes:
        yield tuple(_FLAGS)
    else:
        yield from ((name,) for name in _FLAGS)


STREAMS = (32, 8, 1)
KINDS = ("greedy", "sampled")
_CELLS_PER_STREAM = 1024
# Of a unit of work on a card: three servers start, age, and are loaded.
_UNIT_S = 120.0


def common(job: Job, name: str) -> Common:
    """Return what all servers share. On a card the threads of llama.cpp compute next to nothing."""
    return Common(model=model_file(name), threads=1 if job.rehearsal else 4)


def profile(job: Job, rows: tuple[Row, ...]) -> Profile:
    """Return how often rows are measured, on how old servers."""
    rounds, age_prompts = (1, 4) if job.rehearsal else (3, 32)
    return Profile(rows=rows, models=(), rounds=rounds, age_prompts=age_prompts, age_words=100, between=1)


def shorter(job: Job) -> tuple[str, ...]:
    """Return the arguments that make the outputs of a load short, in a rehearsal."""
    return ("--tokens", "48") if job.rehearsal else ()


def lines(result: RowResult) -> list[dict[str, Any]]:
    """Return the figures of a row beside each peer, and the rounds behind them."""
    found = []
    for peer in result.lineup.peers:
        beside = replace(result, lineup=result.lineup.only({peer.name}))
        # A line names its peer only if that has the figure.
        found += [{"row": result.row.name, **asdict(line), "peer": peer.name} for line in summarise(beside)]
    return found


def run(job: Job) -> None:
    """Measure what has not been measured yet."""
    longest = 30.0 if job.rehearsal else _UNIT_S
    for streams in STREAMS:
        for name in MEASURED:
            for peers in peer_groups(model_file(name)):
                unit = f"{name}-{streams}-{'-'.join(peers)}".replace(" ", "")
                if unit in kept("rows"):
                    continue
                job.need(longest)
                started = time.monotonic()
                keep("rows", unit, {"model": name, "streams": streams, "lines": _measured(job, name, streams, peers)})
                longest = max(longest, time.monotonic() - started)


def _measured(job: Job, name: str, streams: int, peers: tuple[str, ...]) -> list[dict[str, Any]]:
    servers = lineup(streams, streams * _CELLS_PER_STREAM, peers)
    names = [f"{kind}-streamed-{streams}" for kind in KINDS]
    # The bare engine has a stage of its own: here it would load the model once more for each figure.
    rows = tuple(
        replace(
            row,
            lineup=servers,
            arguments=(*row.arguments, *shorter(job)),
            figures=tuple(replace(figure, bound=None) for figure in row.figures),
        )
        for row in OVERHEAD_ROWS
        if row.name in names
    )
    plan = Plan(rows=rows, profile=profile(job, rows), peers=None, seed=0)
    *_, results = measure(plan, common(job, name))
    return [line for result in results for line in lines(result)]


if __name__ == "__main__":
    sys.exit(run_stage(run))
