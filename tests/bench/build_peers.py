"""Builds llama-server and llama-batched-bench from the llama.cpp source inside the pinned llama-cpp-python.

Source and flags are those of the library that the shards load, so that a comparison shows differences of the servers
only.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

from bench.paths import CACHE, BenchError, peers_dir, pinned_version

_LAST_LINES = 20
_STILL_ALIVE_S = 20


def package_source() -> Path:
    """Return the unpacked source of the pinned llama-cpp-python; download it from PyPI if needed."""
    version = pinned_version()
    folder = peers_dir(version)
    source = folder / "src"
    if (source / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file():
        return source
    archive = package_archive()
    print("unpacking", flush=True)
    unpacked = folder / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    shutil.rmtree(source, ignore_errors=True)
    next(unpacked.iterdir()).rename(source)
    unpacked.rmdir()
    return source


def package_archive() -> Path:
    """Return the archive with the source of the pinned llama-cpp-python; download it from PyPI if needed."""
    version = pinned_version()
    folder = peers_dir(version)
    archive = CACHE / f"llama_cpp_python-{version}.tar.gz"
    if not archive.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        # Only this package must come as source. pip builds its metadata, for which its build tools may come as wheels.
        download = [sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-python", "--no-deps"]
        download += ["--dest", str(CACHE), f"llama-cpp-python=={version}"]
        logged(f"downloading llama-cpp-python {version}", download, folder / "download.log", os.environ.copy())
    return archive


def with_cmake(environment: dict[str, str]) -> dict[str, str]:
    """Return ``environment`` with cmake in its path; install cmake from PyPI if the host has none."""
    if shutil.which("cmake"):
        return environment
    tools = CACHE / "tools"
    bin_dir = tools / "bin"
    if not (bin_dir / "cmake").is_file():
        install = [sys.executable, "-m", "pip", "install", "--prefix", str(tools), "cmake", "ninja"]
        CACHE.mkdir(exist_ok=True)
        logged("installing cmake and ninja", install, CACHE / "tools.log", environment)
    packages = next(tools.glob("lib/python*/site-packages"))
    return {**environment, "PATH": f"{bin_dir}{os.pathsep}{environment['PATH']}", "PYTHONPATH": str(packages)}


def logged(what: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run ``command`` with its output in ``log``, and print the last line of the log from time to time."""
    print(f"{what} ...", flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        done = threading.Event()
        watcher = threading.Thread(target=_show_progress, args=(log, done), daemon=True)
        watcher.start()
        try:
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
            done.set()
            watcher.join()
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        message = f"{what} failed with status {status}; the end of {log}:\n{tail}"
        raise BenchError(message)
    print(f"{what}: done in {time.monotonic() - started:.0f} s", flush=True)


def _show_progress(log: Path, done: threading.Event) -> None:
    while not done.wait(_STILL_ALIVE_S):
        lines = log.read_text(errors="replace").splitlines()
        if lines:
            print(f"  {lines[-1][:110]}", flush=True)


TARGETS = ("llama-server", "llama-batched-bench")
_CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    # The host's instruction set, as in the build of the wheel.
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    # Both would download files of a web page during the build, which a benchmark does not need.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
)


def main() -> int:
    """Build the missing programs."""
    parser = argparse.ArgumentParser(prog="build_peers", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compilations")
    args = parser.parse_args()
    try:
        build(jobs=args.jobs)
    except BenchError as error:
        print(f"build_peers: {error}", file=sys.stderr)
        return 1
    return 0


def build(*, jobs: int) -> None:
    """Build both programs unless they exist."""
    version = pinned_version()
    folder = peers_dir(version)
    if all((folder / "bin" / name).is_file() for name in TARGETS):
        print(f"the peers of llama-cpp-python {version} are built")
        return
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        message = "no C++ compiler found: install g++ (on Debian: apt install g++)"
        raise BenchError(message)
    source = package_source() / "vendor" / "llama.cpp"
    environment = with_cmake(os.environ.copy())
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=environment["PATH"]) else []
    work = folder / "build"
    configure = ["cmake", "-S", str(source), "-B", str(work), *generator, *_CMAKE_FLAGS]
    logged("configuring", configure, folder / "configure.log", environment)
    compile_ = ["cmake", "--build", str(work), "--target", *TARGETS, "-j", str(jobs)]
    logged("compiling (about 10 minutes on 2 cores)", compile_, folder / "build.log", environment)
    (folder / "bin").mkdir(exist_ok=True)
    for name in TARGETS:
        shutil.copy2(work / "bin" / name, folder / "bin" / name)
    print(f"built {' and '.join(TARGETS)} of llama-cpp-python {version}")


if __name__ == "__main__":
    sys.exit(main())
