"""Builds llama.cpp: the libraries that the shards load, and llama-server and llama-batched-bench beside them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.build_peers import TARGETS
from bench.paths import peers_dir, pinned_version
from gpu.kit import cuda
from gpu.kit.job import BUILD, PYTHON, ROOT, UNPACKED, VENV, Job, KitError, UnfinishedError, run_stage

_CHANGES = Path(__file__).with_name("programs.cmake")
_FLAGS = (
    f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={_CHANGES}",
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DGGML_RPC=ON",
    "-DLLAVA_BUILD=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
_SHOW_S = 15
_STOP_S = 20


def run(job: Job) -> None:
    """Build what is missing, and put it where the package and the comparisons look for it."""
    environment = dict(os.environ) if job.rehearsal else cuda.with_compiler(dict(os.environ))
    if not (BUILD / "CMakeCache.txt").is_file():
        card = [] if job.rehearsal else cuda.flags(environment)
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = ["cmake", "-S", str(UNPACKED), "-B", str(BUILD), *generator, *_FLAGS, *card]
        _logged(configure, environment, job)
    jobs = str(os.cpu_count() or 1)
    _logged(["cmake", "--build", str(BUILD), "-j", jobs, "--target", *TARGETS, "llama", "ggml"], environment, job)
    _place()
    subprocess.run([str(VENV / "bin" / "caravan-shard"), "--list-devices"], cwd=ROOT, check=True)


def _logged(command: list[str], environment: dict[str, str], job: Job) -> None:
    """Run a command with its output in a log, show its last line from time to time, and stop it when the time is over.

    A build that is interrupted leaves no half-written file, and goes on where it was.
    """
    BUILD.mkdir(parents=True, exist_ok=True)
    log = BUILD / "kit.log"
    print(" ".join(command), flush=True)
    with log.open("a") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None:
            try:
                process.wait(min(_SHOW_S, max(0.0, job.left_s() - _STOP_S)))
            except subprocess.TimeoutExpired:
                print(f"  {_last_lines(log, 1)[:110]}", flush=True)
            if process.poll() is None and job.left_s() <= _STOP_S:
                _interrupt(process)
                message = f"the build is at: {_last_lines(log, 3)}"
                raise UnfinishedError(message)
    if process.returncode != 0:
        message = f"{command[0]} ended with {process.returncode}; the end of {log}:\n{_last_lines(log, 40)}"
        raise KitError(message)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(_STOP_S / 2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_lines(log: Path, count: int) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


def _place() -> None:
    """Link the modules, the libraries and the programs: the libraries find each other in the build's folders."""
    packages = next((VENV / "lib").glob("python3*/site-packages"))
    package = packages / "llama_cpp"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(UNPACKED / "llama_cpp", package)
    (package / "lib").mkdir(exist_ok=True)
    for library in BUILD.rglob("lib*.so*"):
        link = package / "lib" / library.name
        if not link.exists():
            link.symlink_to(library)
    programs = peers_dir(pinned_version()) / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in TARGETS:
        link = programs / name
        link.unlink(missing_ok=True)
        link.symlink_to(next(path for path in BUILD.rglob(name) if path.is_file() and os.access(path, os.X_OK)))
    # A stamp of make's, which would otherwise set up an environment of its own.
    (VENV / ".installed").touch()
    print(f"{PYTHON} has llama.cpp, and {programs} its programs, {time.strftime('%H:%M:%S')}")


if __name__ == "__main__":
    sys.exit(run_stage(run))
