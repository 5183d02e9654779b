"""Caravan as it was at another revision, to see what a change costs: `make bench ARGS="--against HEAD~1"`."""

import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.figures import ROUTER_CPU, SERVER_CPU, Better
from bench.paths import CACHE, ROOT, BenchError
from bench.rows import Row
from bench.summary import RowResult, summarise

# A figure that is worse by more than this share is named.
_TOLERANCE = 0.03


def checkout(revision: str) -> Path:
    """Return a folder with the files of ``revision`` and an environment of its own. Raises BenchError."""
    commit = _git("rev-parse", "--short", f"{revision}^{{commit}}").decode().strip()
    folder = CACHE / "bench" / "revisions" / commit
    if not (folder / ".venv" / ".installed").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as files:
            files.extractall(folder, filter="data")
        command = [sys.executable, str(folder / "deploy" / "setup" / "install.py")]
        if subprocess.run(command, cwd=folder, check=False).returncode != 0:
            message = f"cannot set up {revision} in {folder}"
            raise BenchError(message)
    return folder


def compared_with(row: Row, folder: Path) -> Row:
    """Return ``row`` with the Caravan of ``folder`` as its only peer, without the bare engine.

    The processor time of a whole server is compared too, since it varies less than a rate.
    """
    figures = (*(replace(figure, bound=None) for figure in row.figures if figure is not ROUTER_CPU), SERVER_CPU)
    return replace(row, lineup=row.lineup.beside(folder), figures=figures)


def losses(models: Mapping[str, Sequence[RowResult]]) -> list[str]:
    """Return a line for each figure that is worse than before by more than 3 % in the median."""
    found = []
    for model, results in models.items():
        for result in results:
            for figure, line in zip(result.row.figures, summarise(result), strict=True):
                ratio = 1.0 if line.ratio is None else line.ratio.median
                if (ratio if figure.better is Better.HIGHER else 1 / ratio) < 1 - _TOLERANCE:
                    found.append(f"{model}, {line.label}: {ratio:.3f} of before")
    return found


def _git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        message = f"git {arguments[0]}: {done.stderr.decode().strip()}"
        raise BenchError(message)
    return done.stdout
