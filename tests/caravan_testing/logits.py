"""Logits of every kind that sampling must cope with."""

import ctypes
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.joint_draw import LlamaJointDraw
from caravan_shard.backends.llama.kernels.joint_logprobs import LlamaJointLogprobs


def kinds_of_logits(size: int) -> Iterator[tuple[str, Floats]]:
    """Yield names and logits [size]."""
    random = np.random.default_rng(size)
    normal = random.standard_normal(size).astype(np.float32)
    for scale in (0.1, 1.0, 3.0, 10.0):
        yield f"normal, {scale}", normal * np.float32(scale)
    peaked = normal.copy()
    peaked[-1] = 20.0
    yield "peaked", peaked
    # As a model's: few tokens are likely, and the others have a long tail.
    yield "model", (normal - 3.0 * np.log(random.permutation(size) + 1.0)).astype(np.float32)
    yield "ties", np.round(normal * 3.0).astype(np.float32)
    yield "some ties", (np.round(normal * 300.0) / 100.0).astype(np.float32)
    yield "all equal", np.full(size, 1.5, np.float32)
    masked = normal * np.float32(3.0)
    masked[random.random(size) < 0.9] = -np.inf
    masked[0] = 0.0
    yield "masked", masked
    broken = normal.copy()
    broken[size // 2] = np.nan
    yield "one NaN", broken
    broken = normal.copy()
    broken[-1] = np.nan
    yield "NaN at the end", broken


_KERNELS = Path(__file__).parents[2] / "shard" / "kernels"
_SOURCES = [str(_KERNELS / "src" / name) for name in ("draw_rows.c", "draw_weighed.c", "logprob_rows.c")]


@cache
def compile_row_functions(*flags: str) -> ctypes.CDLL:
    """Compile with these flags of the compiler, and load; once per process, since it takes a second."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / "librow_functions.so"
        command = ["cc", "-O3", *flags, "-Wall", "-Wextra", "-Werror", f"-I{_KERNELS / 'include'}", "-shared", "-fPIC"]
        subprocess.run([*command, *_SOURCES, "-o", str(library), "-lm"], check=True)
        return ctypes.CDLL(str(library))


def compile_joint_draw(*flags: str, threads: int = 1) -> LlamaJointDraw:
    """Compile and load what draws rows."""
    return LlamaJointDraw(compile_row_functions(*flags), threads)


def compile_joint_logprobs(*flags: str) -> LlamaJointLogprobs:
    """Compile and load what computes log probabilities of rows."""
    return LlamaJointLogprobs(compile_row_functions(*flags))
