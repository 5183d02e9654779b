"""`kernels/src/barrier.c`, in a small program of its own: no thread goes on before all have come, and none hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_KERNELS = Path(__file__).parents[3] / "shard" / "kernels"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ggml keeps the barrier of OpenMP")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled program."""
    path = tmp_path_factory.mktemp("barrier") / "barrier_check"
    sources = [str(_KERNELS / "tests" / "barrier_check.c"), str(_KERNELS / "src" / "barrier.c")]
    flags = [
        "-std=gnu11",
        "-O3",
        "-D_GNU_SOURCE",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{_KERNELS / 'include'}",
        "-pthread",
    ]
    subprocess.run(["cc", *flags, *sources, "-o", str(path)], check=True)
    return path


@pytest.mark.parametrize("looks", ["0", "1", "101", "3000", "not a number"])
@pytest.mark.parametrize(
    ("threads", "meetings", "pause_us"),
    [(2, 20_000, 0), (5, 4_000, 0), (3, 50, 5_000)],
    ids=["few", "more than cores", "one is slow"],
)
def test_threads_go_on_together(program: Path, looks: str, threads: int, meetings: int, pause_us: int) -> None:
    """They spin, offer their cores or sleep; the slow one makes the others sleep."""
    command = [str(program), str(threads), str(meetings), str(pause_us)]
    environment = {**os.environ, "GOMP_SPINCOUNT": looks}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, ended.stdout) == (0, f"{meetings}\n")
