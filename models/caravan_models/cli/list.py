"""The command `caravan list`: list the downloaded models, or those with short names."""

import argparse
import sys
import time
from collections.abc import Sequence

from caravan_models.cache_folder import cache_folder
from caravan_models.cli.command import run
from caravan_models.known import known_models
from caravan_models.listing import size_text
from caravan_models.local_store import stored_models, unfinished
from caravan_models.reference import HUB_PREFIX


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(prog="caravan list", description=__doc__, allow_abbrev=False)
    parser.add_argument("--known", action="store_true", help="list the models with short names, downloaded or not")
    known: bool = parser.parse_args(argv).known
    return run(parser.prog, _list_known if known else _list_stored)


def _list_known() -> None:
    _write([("NAME", "WHERE"), *((one.name, HUB_PREFIX + one.source.name) for one in known_models().values())])


def _list_stored() -> None:
    cache = cache_folder()
    # Of several names of one model, the first and shortest.
    short = {one.source.name: one.name for one in reversed(known_models().values())}
    rows = [
        (
            short.get(model.name, HUB_PREFIX + model.name),
            model.quantisation,
            size_text(model.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified_s)),
        )
        for model in stored_models(cache)
    ]
    if rows:
        _write([("NAME", "QUANTISATION", "SIZE", "CHANGED"), *rows])
    else:
        sys.stderr.write(f"no models in {cache}; get one with `caravan pull smollm2`\n")
    for one in unfinished(cache):
        sys.stderr.write(f"unfinished: {size_text(one.size)} of {one.repository}\n")


def _write(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(f"{line.rstrip()}\n")
