"""What the kit carries: enough to build, and no more than may travel."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from gpu.kit.job import LIMIT, KitError, size_table
from gpu.kit.pack import archive_wheels, needs, requirements, strip_source

NEEDED = (
    "CMakeLists.txt",
    "llama_cpp/llama_cpp.py",
    "vendor/llama.cpp/CMakeLists.txt",
    "vendor/llama.cpp/cmake/build-info.cmake",
    # Even a server without a page runs it.
    "vendor/llama.cpp/scripts/ui-assets.cmake",
    "vendor/llama.cpp/ggml/src/ggml-cuda/template-instances/mmq-instance-q4_k.cu",
    # With the folder of all files, longer than the 100 characters that the header of a tar file has for a name.
    "vendor/llama.cpp/ggml/src/ggml-cuda/template-instances/fattn-mma-f16-instance-ncols1_1-ncols2_16.cu",
    "vendor/llama.cpp/ggml/src/ggml-cpu/arch/x86/quants.c",
    "vendor/llama.cpp/src/models/qwen3moe.cpp",
    "vendor/llama.cpp/tools/server/server.cpp",
    "vendor/llama.cpp/tools/batched-bench/CMakeLists.txt",
)
NEEDLESS = (
    "vendor/llama.cpp/models/ggml-vocab-llama-bpe.gguf",
    "vendor/llama.cpp/docs/build.md",
    "vendor/llama.cpp/ggml/src/ggml-vulkan/ggml-vulkan.cpp",
    "vendor/llama.cpp/tools/server/README.md",
    "vendor/llama.cpp/tools/ui/package.json",
    "llama_cpp/lib/libllama.so",
)


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_build_reads_is_carried(name: str) -> None:
    assert needs(name)


@pytest.mark.parametrize("name", NEEDLESS)
def test_what_no_build_reads_stays(name: str) -> None:
    assert not needs(name)


def test_a_stripped_archive_has_the_needed_files_without_their_common_folder(tmp_path: Path) -> None:
    whole, stripped = tmp_path / "whole.tar.gz", tmp_path / "stripped.tar.xz"
    with tarfile.open(whole, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for name in (*NEEDED, *NEEDLESS):
            member = tarfile.TarInfo(f"llama_cpp_python-1.0/{name}")
            member.size = len(name)
            archive.addfile(member, io.BytesIO(name.encode()))
    strip_source(whole, stripped)
    with tarfile.open(stripped) as archive:
        assert tuple(archive.getnames()) == NEEDED
        first = archive.extractfile(NEEDED[0])
        assert first is not None
        assert first.read() == NEEDED[0].encode()


def test_the_wheels_are_those_of_server_and_tests_without_what_is_built_there() -> None:
    names = {requirement.partition(">")[0].partition("=")[0] for requirement in requirements()}
    # Needed by the server, by the tests, by llama-cpp-python, and for installing.
    assert {"grpcio", "aiohttp", "msgspec", "pytest", "gguf", "diskcache", "hatchling", "pip"} <= names
    assert not {"llama-cpp-python", "mypy", "openai"} & names


def test_wheels_in_an_archive_have_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    code = b"answer = 42\n" * 1000
    with zipfile.ZipFile(tmp_path / "wheels" / "one-1.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("one.py", code)
        program = zipfile.ZipInfo("one-1.data/scripts/run")
        program.external_attr = 0o100755 << 16
        wheel.writestr(program, b"#!python")
    archive_wheels(tmp_path / "wheels", tmp_path / "wheels.tar.xz")
    with tarfile.open(tmp_path / "wheels.tar.xz") as archive:
        archive.extractall(tmp_path / "back", filter="data")
    with zipfile.ZipFile(tmp_path / "back" / "one-1.whl") as wheel:
        assert wheel.read("one.py") == code
        assert [info.compress_type for info in wheel.infolist()] == [zipfile.ZIP_STORED] * 2
        assert wheel.getinfo("one-1.data/scripts/run").external_attr == 0o100755 << 16


def test_the_sizes_are_summed() -> None:
    text = size_table({"the repository": 7 << 20, "wheels": 47 << 20})
    assert "54.0 MiB  together" in text
    assert "10.0 MiB  left of 64" in text


def test_too_much_is_refused_with_the_sizes() -> None:
    size_table({"wheels": LIMIT})
    with pytest.raises(KitError, match=r"1\.0 MiB above 64:\n.*7\.0 MiB  the repository\n.*58\.0 MiB  wheels"):
        size_table({"the repository": 7 << 20, "wheels": 58 << 20})
