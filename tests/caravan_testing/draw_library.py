"""Compiles the function that draws rows together, as a build of llama.cpp by `deploy/setup` has it."""

import ctypes
import subprocess
from pathlib import Path

from caravan_shard.backends.llama.joint_draw import LlamaJointDraw

_SOURCE = Path(__file__).parents[2] / "deploy" / "setup" / "draw_rows.c"


def compile_joint_draw(folder: Path, *flags: str) -> LlamaJointDraw:
    """Compile into ``folder``, with these flags of the compiler, and load."""
    library = folder / "libdraw_rows.so"
    command = ["cc", "-O3", *flags, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", str(_SOURCE), "-o", str(library)]
    subprocess.run([*command, "-lm"], check=True)
    return LlamaJointDraw(ctypes.CDLL(str(library)))
