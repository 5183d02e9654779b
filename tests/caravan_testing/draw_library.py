"""Compiles the functions for rows of logits, as a build of llama.cpp by `deploy/setup` has them."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from caravan_shard.backends.llama.kernels.joint_draw import LlamaJointDraw
from caravan_shard.backends.llama.kernels.joint_logprobs import LlamaJointLogprobs

_SETUP = Path(__file__).parents[2] / "deploy" / "setup"
_SOURCES = [str(_SETUP / name) for name in ("draw_rows.c", "draw_weighed.c", "logprob_rows.c")]


@cache
def compile_row_functions(*flags: str) -> ctypes.CDLL:
    """Compile with these flags of the compiler, and load; once per process, since it takes a second."""
    with TemporaryDirectory() as folder:
        library = Path(folder) / "librow_functions.so"
        command = ["cc", "-O3", *flags, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *_SOURCES]
        subprocess.run([*command, "-o", str(library), "-lm"], check=True)
        return ctypes.CDLL(str(library))


def compile_joint_draw(*flags: str, threads: int = 1) -> LlamaJointDraw:
    """Compile and load what draws rows."""
    return LlamaJointDraw(compile_row_functions(*flags), threads)


def compile_joint_logprobs(*flags: str) -> LlamaJointLogprobs:
    """Compile and load what computes log probabilities of rows."""
    return LlamaJointLogprobs(compile_row_functions(*flags))
