"""The command `caravan rm`: remove a model from the cache."""

import argparse
import sys
from collections.abc import Sequence

from caravan_models.cache_folder import cache_folder
from caravan_models.cli.command import NAME_HELP, named, run
from caravan_models.listing import size_text
from caravan_models.local_store import remove
from caravan_models.reference import hub_model


def main(argv: Sequence[str] | None = None) -> int:
    """Remove the models that are named; say how much is free then. A server that runs keeps what it has loaded."""
    parser = argparse.ArgumentParser(prog="caravan rm", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="+", metavar="name", help=NAME_HELP)
    names: list[str] = parser.parse_args(argv).names

    def remove_all() -> None:
        for reference in [named(name) for name in names]:
            freed = remove(hub_model(reference), cache_folder())
            sys.stdout.write(f"removed {reference.name}: {size_text(freed)}\n")

    return run(parser.prog, remove_all)
