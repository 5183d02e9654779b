"""The command `caravan show`: describe a model from its own files."""

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from caravan_models.cached_model import found_model
from caravan_models.cli.command import NAME_HELP, run
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.fetched import FetchedModel
from caravan_models.gguf_facts import gguf_facts
from caravan_models.listing import size_text

Row = tuple[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each thing that is known of the model."""
    parser = argparse.ArgumentParser(prog="caravan show", description=__doc__, allow_abbrev=False)
    parser.add_argument("name", help=f"a GGUF file, {NAME_HELP}; it must be downloaded")
    parser.add_argument(
        "--fit",
        action="store_true",
        help="also show where a shard would place it and what is left; accepts the shard's flags",
    )
    arguments, shard_flags = parser.parse_known_args(argv)
    if shard_flags and not arguments.fit:
        parser.error(f"unrecognized arguments: {' '.join(shard_flags)}")

    def show() -> None:
        model = found_model(arguments.name)
        _write(rows(model))
        if arguments.fit:
            sys.stdout.write(f"\n{fit_report(model.model, shard_flags)}")

    return run(parser.prog, show)


def fit_report(file: Path, shard_flags: Sequence[str]) -> str:
    """Return what a shard with these flags would take of each memory. Raises FetchError with what the shard says."""
    command = [sys.executable, "-m", "caravan_shard", "--fit-report", "--log-level", "warning", "--model", str(file)]
    done = subprocess.run([*command, *shard_flags], capture_output=True, text=True, check=False)  # noqa: S603 - no shell
    if done.returncode != 0:
        line = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise FetchError(FetchProblem.NO_MODEL, line.removeprefix("caravan-shard: error: "))
    return done.stdout


def rows(model: FetchedModel) -> Iterable[Row]:
    """Yield what is known of a model, each with its label. Raises FetchError, OSError."""
    facts = gguf_facts(model.parts)
    if not facts.architecture:
        raise FetchError(FetchProblem.NO_MODEL, f"{model.model} names no architecture: it is no model")
    yield "name", model.name
    if facts.title:
        yield "title", facts.title
    yield "architecture", facts.architecture
    yield "parameters", count_text(facts.parameter_count)
    if facts.quantisation:
        yield "quantisation", facts.quantisation
    if facts.trained_context is not None:
        yield "context", f"{facts.trained_context:,} tokens"
    if facts.layer_count is not None:
        yield "layers", str(facts.layer_count)
    if facts.licence:
        yield "licence", facts.licence
    yield "size", f"{size_text(model.size)} ({model.size:,} bytes)"
    if model.digest:
        yield "digest", f"sha256:{model.digest}"
    for part in model.parts:
        yield "file", _file(part)
    if model.projector is not None:
        yield "projector", _file(model.projector)


def _file(path: Path) -> str:
    return f"{path} ({size_text(path.stat().st_size)})"


def count_text(count: int) -> str:
    """Return a number of parameters as people write it, such as "134.5 M"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count)


def _write(lines: Iterable[Row]) -> None:
    for label, value in list(lines):
        sys.stdout.write(f"{label:<14}{value}\n")
