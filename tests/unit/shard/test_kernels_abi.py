"""A shard and a llama.cpp with other code of `deploy/setup` than the shard calls refuse each other."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.kernels.kernels_abi import KERNELS_ABI, check_kernels
from caravan_testing.shard_tiny_llama import write_tiny_llama

_SETUP = Path(__file__).parents[3] / "deploy" / "setup"

# What this number stands for, in the order of the files. Whoever changes the list raises the number on both sides.
_NUMBER = 1
_INTERFACE = [
    "int caravan_kernels_abi(void)",
    (
        "void caravan_choose_tokens(const float * logits, int64_t size, const struct caravan_row * rows, "
        "int64_t count, int32_t * tokens, int64_t threads)"
    ),
    "struct caravan_logprob_row { int64_t index; int64_t token; int64_t count; }",
    (
        "void caravan_logprob_rows(const float * logits, int64_t size, const struct caravan_logprob_row * rows, "
        "int64_t count, int32_t * ids, double * logprobs)"
    ),
    (
        "struct caravan_row { int64_t index; const uint8_t * mask; double number; double xtc_threshold; "
        "double temperature; double top_k; double typical_p; double top_p; double min_p; double reach; }"
    ),
    "int caravan_row_by_row",
    "struct caravan_states { void * rows; int64_t room; int64_t taken; }",
    "bool caravan_take_states(struct ggml_tensor * node, bool ask, void * data)",
]


def compiled(folder: Path, code: str, name: str = "library.so") -> Path:
    """Return a library with this code. Later tests of this process take one that is named libggml-cpu for a backend."""
    source, library = folder / "library.c", folder / name
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def with_number(number: int) -> str:
    """Return what is compiled for a build with this number."""
    own = (_SETUP / "abi.c").read_text()
    changed, count = re.subn(r"(?m)^#define CARAVAN_KERNELS_ABI \d+$", f"#define CARAVAN_KERNELS_ABI {number}", own)
    assert count == 1
    return changed


def test_both_sides_have_the_same_number() -> None:
    assert with_number(KERNELS_ABI) == (_SETUP / "abi.c").read_text()


def test_the_number_stands_for_what_the_shard_calls() -> None:
    exported = re.compile(r'(struct caravan_\w+ \{[^}]*\})|__attribute__\(\(visibility\("default"\)\)\) ([^;={]*)')
    found = []
    for path in sorted(_SETUP.glob("*.[ch]")):
        code = " ".join(re.sub(r"//.*", "", path.read_text()).split())
        found += [(struct or declared).strip() for struct, declared in exported.findall(code)]
    assert (KERNELS_ABI, found) == (_NUMBER, _INTERFACE)


def test_the_code_beside_it_is_accepted(tmp_path: Path) -> None:
    check_kernels([ctypes.CDLL(str(compiled(tmp_path, (_SETUP / "abi.c").read_text())))])


def test_a_build_without_our_code_is_accepted(tmp_path: Path) -> None:
    check_kernels([ctypes.CDLL(str(compiled(tmp_path, "int of_another_kind;")))])


@pytest.mark.parametrize(
    ("code", "number"),
    [(with_number(KERNELS_ABI + 1), KERNELS_ABI + 1), ("int caravan_row_by_row;", 0)],
    ids=["newer", "older than the number"],
)
def test_another_number_is_refused(code: str, number: int, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=f"version {number} of .* calls version {KERNELS_ABI}: .*`make run`"):
        check_kernels([ctypes.CDLL(str(compiled(tmp_path, code)))])


@pytest.mark.skipif(sys.platform != "linux", reason="finds the backends for CPUs on Linux only")
def test_a_shard_that_finds_another_number_ends_with_one_line(tmp_path: Path) -> None:
    library = compiled(tmp_path, with_number(KERNELS_ABI + 1), "libggml-cpu-other.so")
    model = tmp_path / "tiny.gguf"
    write_tiny_llama(model)
    command = [sys.executable, "-m", "caravan_shard", "--address", "127.0.0.1:0", "--model", str(model)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert errors == done.stderr.splitlines()[-1:]
    assert f"version {KERNELS_ABI + 1} of Caravan's kernels" in errors[0]
    assert "Traceback" not in done.stderr
