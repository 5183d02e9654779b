"""Builds the test programs and the C code of `shard/kernels` with gcc's sanitizers, and runs them."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_KERNELS = Path(__file__).parents[2] / "shard" / "kernels"
_PROGRAMS = _KERNELS / "tests"
_FLAGS = ("-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
_GGML_HEADERS = ("ggml-backend.h", "ggml-cpu.h", "ggml-cpu-impl.h", "ops.h", "llamafile/sgemm.h", "tiled/tiled.h")
_LIMIT_S = 240

MEMORY = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
"""Memory that is not the program's, and what C does not define."""
RACES = ("-fsanitize=thread",)
"""Memory that threads use at once, though at least one of them writes."""


@dataclass(frozen=True, slots=True)
class Checker:
    """A program that calls functions of ``sources`` in `src/` and checks what they do.

    ``own``: its sources in `tests/`. ``given``: what it is called with. ``flags``: further ones of the compiler.
    """

    own: tuple[str, ...]
    sources: tuple[str, ...]
    given: tuple[str, ...]
    flags: tuple[str, ...] = ("-pthread",)

    @property
    def name(self) -> str:
        """What it checks."""
        return self.own[0].removesuffix("_check.c")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a file in `src/` or `include/`, in which ``before`` occurs once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it has written."""

    status: int
    output: str


def run(checker: Checker, folder: Path, *flags: str, change: Change | None = None) -> Ended:
    """Compile in ``folder`` with these flags, run, and return how it ended. ``change``: of a copy of the sources."""
    # One folder of both, as a change names a file of either.
    kernels = folder / "kernels"
    kernels.mkdir()
    for path in (*_KERNELS.glob("src/*.c"), *_KERNELS.glob("include/*.h")):
        shutil.copy(path, kernels)
    if change is not None:
        code = (kernels / change.file).read_text()
        assert code.count(change.before) == 1, f"{change.before!r} is not once in {change.file}"
        (kernels / change.file).write_text(code.replace(change.before, change.after))
    for name in _GGML_HEADERS:
        header = folder / "ggml" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "ggml_stand_in.h"\n')
    sources = [*(_PROGRAMS / name for name in checker.own), *(kernels / name for name in checker.sources)]
    places = [f"-I{place}" for place in (kernels, _PROGRAMS, folder / "ggml")]
    program = folder / "program"
    command = ["gcc", *_FLAGS, *checker.flags, *flags, *places, *map(str, sources), "-lm", "-o", str(program)]
    subprocess.run(command, check=True, timeout=_LIMIT_S)
    # gcc 12's ThreadSanitizer does not find its memory where addresses are as random as newer kernels make them.
    fixed_addresses = ["setarch", "--addr-no-randomize"] if flags[: len(RACES)] == RACES else []
    ended = subprocess.run(
        [*fixed_addresses, str(program), *checker.given],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout)
