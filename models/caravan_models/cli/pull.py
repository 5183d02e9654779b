"""The command `caravan pull`: download a model, so that serving it needs no network."""

import argparse
import sys
from collections.abc import Sequence

from caravan_models.cli.command import NAME_HELP, named, run
from caravan_models.fetching import fetch_blocking
from caravan_models.report import shown


def main(argv: Sequence[str] | None = None) -> int:
    """Print the path of the model's first file once all of them are here."""
    parser = argparse.ArgumentParser(prog="caravan pull", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help=NAME_HELP)
    name: str = parser.parse_args(argv).name

    def pull() -> None:
        reference = named(name)
        with shown(reference.name, _say) as on_progress:
            fetched = fetch_blocking(reference, on_progress)
        if fetched.note:
            _say(fetched.note)
        sys.stdout.write(f"{fetched.model}\n")

    return run(parser.prog, pull)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
