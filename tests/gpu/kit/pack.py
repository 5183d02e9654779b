"""`kit.sh pack`: gets what the host cannot, over the network of who develops, into a folder that travels."""

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

from bench.build_peers import package_archive
from bench.models import add_tokenizer, model
from bench.paths import pinned_version
from gguf import GGUFWriter
from gpu.kit.job import CARRIED, PACKED, ROOT, SOURCE, VOCABULARY, WHEELS, KitError


def archive_wheels(folder: Path, target: Path) -> None:
    """Write the wheels of ``folder``, stored as they are, into an archive that is compressed as a whole."""
    with tarfile.open(target, "w:xz") as archive:
        for wheel in sorted(folder.glob("*.whl")):
            loose = _loose(wheel)
            member = tarfile.TarInfo(wheel.name)
            member.size = len(loose)
            archive.addfile(member, io.BytesIO(loose))


def _loose(wheel: Path) -> bytes:
    """Return a wheel whose files are stored as they are. What it tells of them are digests of their content."""
    target = io.BytesIO()
    with zipfile.ZipFile(wheel) as compressed, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as stored:
        for info in compressed.infolist():
            member = zipfile.ZipInfo(info.filename, info.date_time)
            member.external_attr = info.external_attr
            stored.writestr(member, compressed.read(info))
    return target.getvalue()


# Of llama-cpp-python: its modules, and of llama.cpp what the builds for CPUs, for CUDA and of the server read.
_CODE = r"\.(c|cpp|h|hpp|txt|cmake|in)"
_NEEDED_SOURCE = re.compile(
    r"CMakeLists\.txt|LICENSE[^/]*|llama_cpp/.*\.py|vendor/llama\.cpp/("
    r"CMakeLists\.txt|LICENSE|(cmake|common|include|licenses|src|vendor)/.*|scripts/ui-assets\.cmake|"
    r"ggml/CMakeLists\.txt|ggml/(cmake|include)/.*|ggml/src/[^/]+|ggml/src/ggml-(cpu|cuda|rpc)/.*|"
    rf"tools/.*{_CODE})"
)
_TEST_PLUGINS = ("asyncio", "cov", "timeout", "xdist")
# What the tests of the stage `tests` import, and what installs the repository without a network.
_TEST_PACKAGES = ("gguf", "hypothesis", "jsonschema", "pytest", *(f"pytest-{name}" for name in _TEST_PLUGINS))
_TOOLS = ("pip>=25.1", "hatchling>=1.26", "editables", "pathspec", "pluggy", "trove-classifiers")
_LLAMA = "llama-cpp-python"
# pip takes wheels of exactly the platforms that it is told.
_GLIBC_MINORS = (34, 31, 28, 27, 24, 17, 12, 5)
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in _GLIBC_MINORS), "manylinux2014", "manylinux2010", "manylinux1")


def pack(python: str) -> None:
    """Make the folder anew, for a host with the version ``python`` of Python."""
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir(parents=True)
    strip_source(package_archive(), SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        download_wheels(python, Path(folder))
        archive_wheels(Path(folder), WHEELS)
    cut_vocabulary(model("smollm2-q4_1"), VOCABULARY)
    PACKED.write_text(json.dumps({"python": python, _LLAMA: pinned_version()}))


def strip_source(archive: Path, target: Path) -> None:
    """Write the files of the archive that a build needs, without the folder in which all of them are."""
    with tarfile.open(archive) as whole, tarfile.open(target, "w:xz") as stripped:
        for member in whole:
            name = member.name.partition("/")[2]
            if member.isfile() and needs(name):
                # Not the member with another name: a long name is in its headers, too.
                renamed = tarfile.TarInfo(name)
                renamed.size, renamed.mode, renamed.mtime = member.size, member.mode, member.mtime
                stripped.addfile(renamed, whole.extractfile(member))


def needs(name: str) -> bool:
    """Whether a build needs this file of llama-cpp-python's source."""
    return _NEEDED_SOURCE.fullmatch(name) is not None


def requirements() -> list[str]:
    """Return what pyproject.toml demands of who runs the server and its tests, but for llama-cpp-python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = [*project["project"]["dependencies"], *_TOOLS]
    found += [each for each in project["dependency-groups"]["dev"] if _name(each) in _TEST_PACKAGES]
    # llama-cpp-python is built there; this one is what its modules import.
    return list(dict.fromkeys([*(each for each in found if _name(each) != _LLAMA), "diskcache"]))


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_.-]", requirement)[0].lower()


def download_wheels(python: str, folder: Path) -> None:
    """Get the wheels of the requirements and of what these need, in the versions of constraints.txt."""
    machine = "x86_64"
    target = ["--python-version", python, "--implementation", "cp", "--abi", f"cp{python.replace('.', '')}"]
    target += ["--abi", "abi3", "--abi", "none"]
    for platform in _PLATFORMS:
        target += ["--platform", f"{platform}_{machine}"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", *target]
    command += ["--only-binary", ":all:", "--constraint", "constraints.txt", "--dest", str(folder), *requirements()]
    if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
        message = f"pip cannot get the wheels for Python {python}"
        raise KitError(message)


def cut_vocabulary(source: Path, target: Path) -> None:
    """Write a GGUF file with the tokenizer of ``source`` and no weights."""
    writer = GGUFWriter(target, "llama")
    add_tokenizer(writer, source)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
