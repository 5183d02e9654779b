"""Builds a release of one version into dist/, and checks each part by installing it into a clean environment.

Run by `make release`, with the Python of .venv: it takes the llama-cpp-python that was built for that.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from release_parts import (
    ROOT,
    ReleaseError,
    build_images,
    find_helm,
    image_builder,
    package_chart,
    run,
    write_components,
)
from release_publish import publish_chart, publish_images, sign

from caravan_proto import __version__
from caravan_shard.llama_wheel import BuildError, built_wheel, pinned_requirement, say

DIST = ROOT / "dist"
TOOLS = ROOT / ".cache/tools/release/bin"
KERNELS = ROOT / "shard/kernels"
_START_S = 300
_PROGRAMS = ("caravan", "caravan-router", "caravan-shard")
# The interface of the library is the one that this Caravan calls.
_CHECK_KERNELS = """
from caravan_shard.backends.llama.kernels.cpu_libraries import row_library
from caravan_shard.backends.llama.kernels.kernels_abi import check_kernels
from caravan_kernels import LIBRARY

assert LIBRARY.is_file()
library = row_library()
assert library is not None
check_kernels([], library)
"""


class Environment:
    """A clean environment, without pip: another one's pip installs into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        run([sys.executable, "-m", "venv", "--without-pip", folder])

    def install(self, *arguments: str | Path) -> None:
        """Install packages. Raises ReleaseError."""
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python"]
        run([*pip, "install", "--quiet", *arguments], self.folder)

    def run(self, program: str, *arguments: str) -> str:
        """Run one of its programs outside of the checkout; return what it prints. Raises ReleaseError."""
        return run([self.bin / program, *arguments], self.folder)


def build_python() -> tuple[Path, Path, Path]:
    """Build the source distribution, the wheel from it, and that of the kernels. Return their paths."""
    commit_time = run(["git", "log", "-1", "--format=%ct"]).strip()
    variables = {"SOURCE_DATE_EPOCH": commit_time, "PIP_CONSTRAINT": str(ROOT / "deploy/images/build-tools.txt")}
    say("Building the source distribution, and the wheel from it")
    build = [TOOLS / "python", "-m", "build", "--outdir", DIST]
    run([*build, ROOT], **variables)
    say("Building the wheel of llama-caravan-kernels for all processors of this kind")
    run([*build, "--wheel", "--config-setting=cmake.define.CARAVAN_NATIVE=OFF", KERNELS], **variables)
    return (
        _only(f"llama_caravan-{__version__}.tar.gz"),
        _only(f"llama_caravan-{__version__}-*.whl"),
        _only(f"llama_caravan_kernels-{__version__}-*.whl"),
    )


def _only(pattern: str) -> Path:
    found = list(DIST.glob(pattern))
    if len(found) != 1:
        raise ReleaseError(f"dist/ should have one {pattern}, and has {len(found)}")
    return found[0]


def check_source(archive: Path, folder: Path) -> None:
    """Install Caravan alone from the source distribution. Raises ReleaseError."""
    say(f"Checking {archive.name}: it installs, and each entry point says what is missing")
    clean = Environment(folder)
    clean.install("--no-deps", archive)
    if (printed := clean.run("caravan", "--version")) != f"caravan {__version__}\n":
        raise ReleaseError(f"caravan --version prints {printed!r}")
    for program, flags in (("caravan", ["serve", "smollm2"]), ("caravan-router", []), ("caravan-shard", [])):
        ended = subprocess.run([clean.bin / program, *flags], capture_output=True, text=True, check=False)
        if not re.fullmatch(rf"{program}.*: error: it needs .*: pip install '.*'\n", ended.stderr):
            raise ReleaseError(f"{program} without packages prints:\n{ended.stdout}{ended.stderr}")


def check_kernels(wheel: Path, caravan: Path, llama: Path, folder: Path) -> None:
    """Load the library as a shard does. Raises ReleaseError."""
    say(f"Checking {wheel.name}: a shard finds its functions")
    clean = Environment(folder)
    clean.install("--constraint", ROOT / "constraints.txt", llama, wheel)
    clean.install("--no-deps", caravan)
    clean.run("python", "-c", _CHECK_KERNELS)


def check_wheel(wheel: Path, llama: Path, model: Path, folder: Path) -> Environment:
    """Install the wheel with all that it requires, and let it serve ``model``. Raises ReleaseError."""
    say(f"Checking {wheel.name}: it serves {model.name}")
    clean = Environment(folder)
    clean.install("--constraint", ROOT / "constraints.txt", llama, wheel)
    for program in _PROGRAMS:
        if (printed := clean.run(program, "--version")) != f"{program} {__version__}\n":
            raise ReleaseError(f"{program} --version prints {printed!r}")
    with _serving(clean, model) as url:
        if (version := json.loads(_get(f"{url}/info"))["version"]) != __version__:
            raise ReleaseError(f"/info has the version {version!r}")
        if f'caravan_build_info{{version="{__version__}"}} 1' not in _get(f"{url}/metrics"):
            raise ReleaseError("/metrics has no caravan_build_info of this version")
        (shard,) = json.loads(_get(f"{url}/admin/shards"))["shards"]
        if (kernels := shard["numerics"]["kernels"]) != "own":
            raise ReleaseError(f"the shard has other kernels than that of `make run`: {kernels}")
        body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        text = json.loads(_get(f"{url}/v1/completions", body))["choices"][0]["text"]
        if not text.strip():
            raise ReleaseError("the completion is empty")
    return clean


def _get(url: str, body: str | None = None) -> str:
    request = urllib.request.Request(url, body and body.encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=_START_S) as reply:  # noqa: S310 - a server on this host
        return str(reply.read().decode())


@contextlib.contextmanager
def _serving(clean: Environment, model: Path) -> Iterator[str]:
    """Run `caravan serve` on a free port; yield its URL once it is ready. Raises ReleaseError."""
    log = clean.folder / "serve.log"
    with log.open("w") as output:
        command = [clean.bin / "caravan", "serve", model, "--port", "0", "--hostname", "127.0.0.1"]
        server = subprocess.Popen(command, cwd=clean.folder, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield _ready_url(server, log)
    finally:
        server.terminate()
        server.wait()


def _ready_url(server: "subprocess.Popen[bytes]", log: Path) -> str:
    until = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < until:
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            with contextlib.suppress(OSError):
                _get(f"{found[0]}/health")
                return found[0]
        time.sleep(0.2)
    raise ReleaseError(f"caravan serve was not ready:\n{log.read_text()}")


def write_digests(parts: list[Path]) -> None:
    """Write dist/SHA256SUMS, which `sha256sum --check` reads."""
    lines = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}\n" for part in parts]
    (DIST / "SHA256SUMS").write_text("".join(lines))


def _publish(registry: str, chart: Path, components: Path, helm: Path | None, builder: str | None) -> None:
    """Push and sign what is built. Raises ReleaseError."""
    say(f"Pushing the chart{' and the images' if builder else ''} to {registry}")
    published = [publish_chart(chart, registry, helm)]
    if builder is not None:
        published += publish_images(registry, __version__, builder)
    signed = sign(published, components)
    say("Signed, with the list of components" if signed else "Not signed: cosign is not installed")
    for reference in published:
        say(f"  {reference}")


def main() -> None:
    """Build and check a release; exit with a message if a part fails."""
    model = Path(sys.argv[1]).resolve()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            requirement = pinned_requirement((ROOT / "pyproject.toml").read_text())
            llama = built_wheel(sys.executable, requirement, ROOT / ".cache")
            source, wheel, kernels = build_python()
            check_source(source, folder / "source")
            check_kernels(kernels, wheel, llama, folder / "kernels")
            installed = check_wheel(wheel, llama, model, folder / "wheel")
            say("Writing the list of components")
            components = write_components(DIST, __version__, TOOLS, installed.folder)
        helm = find_helm()
        say(f"Packing the chart {'with helm' if helm else 'as a plain archive: there is no helm to check it'}")
        chart = package_chart(DIST, __version__, helm)
        parts = [source, wheel, kernels, components, chart]
        builder = image_builder()
        if builder is None:
            say("Images skipped: neither buildah, podman nor docker can build here")
        else:
            say(f"Building the images with {builder}: ten minutes or more")
            parts += build_images(DIST, __version__, builder)
        write_digests(parts)
        if registry := os.environ.get("PUBLISH"):
            _publish(registry, chart, components, helm, builder)
    except (ReleaseError, BuildError) as error:
        sys.exit(f"error: {error}")
    say(f"dist/ has version {__version__}: {', '.join(part.name for part in parts)}")


if __name__ == "__main__":
    main()
