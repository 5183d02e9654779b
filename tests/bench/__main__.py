"""Compares Caravan with llama-server: resident servers that have been in use, loaded in turn."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from bench.contenders import Common
from bench.measure import Plan, measure
from bench.models import NAMES, model
from bench.output import table, write
from bench.paths import CACHE, BenchError, describe, peer, pinned_version
from bench.revisions import checkout, compared_with, losses
from bench.rows import PROFILES, Row

if TYPE_CHECKING:
    from bench.summary import RowResult


_PROFILE = (
    "quick: one model, three rounds, short ageing; full: three models, five rounds; overhead: models whose steps take"
    " less than a millisecond; agents: sessions with tools beside a chat"
)


def main() -> int:
    """Measure, print the tables, and write them to .cache/bench/."""
    args = _parser().parse_args()
    # SystemExit unwinds through the servers' context managers; the default action would leave the servers running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.list:
        print("\n".join(f"{row.name:<22}{row.title}" for row in PROFILES[args.profile].rows))
        return 0
    try:
        run(args)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def run(args: argparse.Namespace) -> None:
    """Measure all rows of all models; write the results so far after each round."""
    profile = PROFILES[args.profile]
    given = {"rounds": args.rounds, "age_prompts": args.age, "between": args.between, "threads": args.threads}
    profile = replace(profile, **{name: value for name, value in given.items() if value is not None})
    rows = chosen(args.rows, profile.rows)
    if args.against is not None:
        folder = checkout(args.against)
        rows = tuple(compared_with(row, folder) for row in rows)
    else:
        for name in ("llama-server", "llama-batched-bench"):
            peer(name)
    plan = Plan(rows=rows, profile=profile, peers=chosen_peers(args.peers, rows), seed=args.seed)
    files = {name: model(name) for name in args.models or profile.models}
    stem = CACHE / "bench" / time.strftime("%Y%m%d-%H%M%S")
    stem.parent.mkdir(parents=True, exist_ok=True)
    caption = {
        "machine": describe(),
        "threads": profile.threads,
        "llama-cpp-python": pinned_version(),
        "rounds": profile.rounds,
        "prompts that aged each server": profile.age_prompts,
        "prompts until prefixes return": profile.between,
    }
    models: dict[str, list[RowResult]] = {}
    for name, file in files.items():
        print(f"model {name}", flush=True)
        for results in measure(plan, Common(model=file, threads=profile.threads)):
            models[name] = results
            write(stem, caption, models)
        print(f"\n{table(models[name])}\n", flush=True)
    print(f"written to {stem}.md and .json", flush=True)
    if args.against is not None and (lost := losses(models)):
        message = "\n  ".join((f"worse than {args.against} by more than 3 %:", *lost))
        raise BenchError(message)


def chosen(patterns: Sequence[str] | None, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Return the rows that match any of ``patterns``; None means all. Raises BenchError if a pattern matches none."""
    if patterns is None:
        return rows
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            message = f"no row {pattern!r}: the rows are {', '.join(row.name for row in rows)}"
            raise BenchError(message)
    return tuple(row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in patterns))


def chosen_peers(names: Sequence[str] | None, rows: Sequence[Row]) -> tuple[str, ...] | None:
    """Return ``names``; None means all peers. Raises BenchError if no row compares with one of them."""
    known = {contender.name for row in rows for contender in row.lineup.peers}
    for name in names or ():
        if name not in known:
            message = f"no peer {name!r}: the chosen rows compare with {', '.join(sorted(known))}"
            raise BenchError(message)
    return None if names is None else tuple(names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="list the rows and exit")
    add("--profile", choices=tuple(PROFILES), default="quick", help=_PROFILE)
    add("--rows", nargs="+", metavar="ROW", help="only these rows; * stands for any part of a name")
    add("--models", nargs="+", metavar="MODEL", help=f"{', '.join(NAMES)}, or GGUF files (default: the profile's)")
    add("--peers", nargs="+", metavar="PEER", help="only these peers: split and unified are llama-server's layouts")
    add("--against", metavar="REVISION", help="compare with Caravan at this revision; fail if a figure is 3 %% worse")
    add("--rounds", type=int, help="rounds of each row (default: the profile's)")
    add("--age", type=int, metavar="PROMPTS", help="unrelated prompts that age each server (default: the profile's)")
    add("--between", type=int, metavar="PROMPTS", help="prompts until a prefix returns (default: the profile's)")
    add("--threads", type=int, help="compute threads of every server (default: the profile's)")
    add("--seed", type=int, default=0, help="first of the seeds for the prompts (default 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
