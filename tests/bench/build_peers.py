"""Builds llama-server and llama-batched-bench from the llama.cpp source inside the pinned llama-cpp-python.

Source and flags are those of the library that the shards load, so that a comparison shows differences of the servers
only.
"""

import argparse
import os
import shutil
import sys

from bench.llama_source import logged, package_source, with_cmake
from bench.paths import BenchError, peers_dir, pinned_version

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
