"""Which kernels a shard finds; it refuses a llama.cpp with other code of `shard/kernels` than it calls."""

import ctypes
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import caravan_proto
from caravan_proto.messages.model import Kernels
from caravan_shard.backends.llama.kernels import kernels_abi, row_functions
from caravan_shard.backends.llama.kernels.kernels_abi import KERNELS_ABI, check_kernels
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_tiny_llama import write_tiny_llama

_KERNELS = Path(__file__).parents[3] / "shard" / "kernels"
_OWN = (_KERNELS / "src" / "abi.c").read_text()

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
    changed, count = re.subn(r"(?m)^#define CARAVAN_KERNELS_ABI \d+$", f"#define CARAVAN_KERNELS_ABI {number}", _OWN)
    assert count == 1
    return changed


def test_both_sides_have_the_same_number() -> None:
    assert with_number(KERNELS_ABI) == _OWN


def test_the_number_stands_for_what_the_shard_calls() -> None:
    exported = re.compile(r'(struct caravan_\w+ \{[^}]*\})|__attribute__\(\(visibility\("default"\)\)\) ([^;={]*)')
    found = []
    sources = [*_KERNELS.glob("include/*.h"), *_KERNELS.glob("src/*.c")]
    for path in sorted(sources, key=lambda source: source.name):
        code = " ".join(re.sub(r"//.*", "", path.read_text()).split())
        found += [(struct or declared).strip() for struct, declared in exported.findall(code)]
    assert (KERNELS_ABI, found) == (_NUMBER, _INTERFACE)


def test_the_code_beside_it_is_accepted(tmp_path: Path) -> None:
    check_kernels([ctypes.CDLL(str(compiled(tmp_path, _OWN)))])


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


def test_a_package_of_functions_for_rows_with_another_number_is_refused(tmp_path: Path) -> None:
    check_kernels([], ctypes.CDLL(str(compiled(tmp_path, _OWN, "same.so"))))
    other = ctypes.CDLL(str(compiled(tmp_path, with_number(KERNELS_ABI + 1), "other.so")))
    with pytest.raises(StartupError, match=f"llama-caravan-kernels has version {KERNELS_ABI + 1} "):
        check_kernels([], other)


@pytest.mark.parametrize(
    ("llama", "rows", "found", "warning"),
    [
        (True, False, Kernels.OWN, None),
        (True, True, Kernels.OWN, None),
        (False, True, Kernels.SAMPLING, "attention on CPUs is slower"),
        (False, False, Kernels.STOCK, "attention on CPUs and sampling are slower"),
    ],
)
def test_missing_kernels_are_a_warning_that_names_the_command(
    llama: bool,
    rows: bool,
    found: Kernels,
    warning: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kernels_abi, "has_own_kernels", lambda: llama)
    monkeypatch.setattr(kernels_abi, "row_library", lambda: ctypes.CDLL(None) if rows else None)
    assert kernels_abi.installed_kernels() is found
    kernels_abi.warn_of_missing_kernels()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (0 if warning is None else 1)
    assert all(f"{warning}; `caravan build-llama` " in text for text in texts)


def test_functions_for_rows_are_those_of_the_package_where_llama_cpp_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, rows = compiled(tmp_path, "int none;", "stock.so"), compiled(tmp_path, _OWN, "rows.so")
    monkeypatch.setattr(row_functions, "cpu_libraries", lambda: [ctypes.CDLL(str(stock))])
    monkeypatch.setattr(row_functions, "row_library", lambda: ctypes.CDLL(str(rows)))
    library = row_functions.library_with("caravan_kernels_abi")
    assert library is not None
    assert library._name == str(rows)
    assert row_functions.library_with("caravan_take_states") is None


def test_the_package_has_the_version_of_the_shard() -> None:
    project = tomllib.loads((_KERNELS / "pyproject.toml").read_text())["project"]
    assert project["version"] == caravan_proto.__version__


@pytest.mark.skipif(sys.platform != "linux", reason="finds the backends for CPUs on Linux only")
def test_a_shard_that_finds_another_number_ends_with_one_line(tmp_path: Path) -> None:
    library = compiled(tmp_path, with_number(KERNELS_ABI + 1), "libggml-cpu-other.so")
    model = tmp_path / "tiny.gguf"
    write_tiny_llama(model)
    command = [sys.executable, "-m", "caravan_shard", "--address", "127.0.0.1:0", "--model", str(model)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert errors == done.stderr.splitlines()[-1:]
    assert f"version {KERNELS_ABI + 1} of Caravan's kernels" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_build_can_be_checked_before_any_extra_is_installed() -> None:
    """`caravan build-llama` may run first, so that pip need not compile llama.cpp itself."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('aiohttp', 'google', 'grpc', 'llguidance', 'msgspec'))); "
        "from caravan_shard.build_llama import print_kernels; print_kernels()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "own"), done.stderr
