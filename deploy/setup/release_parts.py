"""What `make release` packs without a program of Python's: the chart, the images, the list of components."""

import gzip
import json
import os
import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/caravan"
# With the program that each of them runs.
IMAGES = {"router": "caravan-router", "shard": "caravan-shard", "serve": "caravan"}
_HELM_OF_TESTS = ROOT / ".cache/tools/deploy/bin/helm"
_VENDORED = ROOT / "router/caravan_studio/page/vendor/vendored.toml"


class ReleaseError(Exception):
    """A part of the release was not made, or fails its check; the message says why."""


def run(command: Sequence[str | Path], folder: Path = ROOT, **variables: str) -> str:
    """Run a command and return what it prints. Raises ReleaseError with its output if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise ReleaseError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def find_helm() -> Path | None:
    """Return helm: the system's, or that of the tests of the chart."""
    found = shutil.which("helm")
    if found is not None:
        return Path(found)
    return _HELM_OF_TESTS if _HELM_OF_TESTS.exists() else None


def package_chart(target: Path, version: str, helm: Path | None) -> Path:
    """Write the chart's archive into ``target`` and check it; return its path. Raises ReleaseError."""
    archive = target / f"caravan-{version}.tgz"
    if helm is not None:
        run([helm, "package", CHART, "--destination", target])
        rendered = run([helm, "template", "release", archive, "--values", CHART / "ci/cpu-minimal.yaml"])
        if f'image: "caravan-router:{version}"' not in rendered:
            raise ReleaseError(f"{archive} renders no router of version {version}")
        return archive
    with (
        archive.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in chart_files():
            tar.add(path, f"caravan/{path.relative_to(CHART)}", filter=_without_owner)
    with tarfile.open(archive) as tar:
        first = tar.extractfile("caravan/Chart.yaml")
        if first is None or f"\nversion: {version}\n" not in first.read().decode():
            raise ReleaseError(f"{archive} is no chart of version {version}")
    return archive


def chart_files() -> list[Path]:
    """Return the files that belong into the chart's archive, as helm packs them: Chart.yaml first."""
    ignored = (CHART / ".helmignore").read_text().split()
    folders = tuple(pattern for pattern in ignored if pattern.endswith("/"))
    files = [
        path
        for path in sorted(CHART.rglob("*"))
        if path.is_file()
        and not f"{path.relative_to(CHART)}".startswith(folders)
        and not any(fnmatch(path.name, pattern) for pattern in ignored)
    ]
    return sorted(files, key=lambda path: path != CHART / "Chart.yaml")


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member


def image_builder() -> str | None:
    """Return the program that can build images here: an installed one may have no daemon, or no rights."""
    for name in ("buildah", "podman", "docker"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


def build_images(target: Path, version: str, builder: str) -> list[Path]:
    """Build the images, let each print its version, and save them into ``target``. Raises ReleaseError."""
    run([ROOT / "deploy/images/build.sh"], BUILDER=builder)
    archives = []
    for part, program in IMAGES.items():
        image, archive = f"localhost/caravan-{part}:{version}", target / f"caravan-{part}-{version}.tar"
        printed = _print_version(image, program, builder)
        if printed.strip() != f"{program} {version}":
            raise ReleaseError(f"{image} prints {printed!r} as its version")
        if builder == "buildah":
            run([builder, "push", image, f"docker-archive:{archive}:{image}"])
        else:
            run([builder, "save", "--output", archive, image])
        archives.append(archive)
    return archives


def _print_version(image: str, program: str, builder: str) -> str:
    if builder != "buildah":
        return run([builder, "run", "--rm", image, "--version"])
    container = run([builder, "from", "--pull-never", image]).strip()
    try:
        return run([builder, "run", container, "--", program, "--version"])
    finally:
        run([builder, "rm", container])


def write_components(target: Path, version: str, tools: Path, environment: Path) -> Path:
    """Write what ``environment`` has, and what the page and the wheel carry of others, as CycloneDX. Return its path.

    Raises ReleaseError.
    """
    path = target / f"llama-caravan-{version}.cdx.json"
    command = ["cyclonedx-py", "environment", "--pyproject", ROOT / "pyproject.toml", "--mc-type", "application"]
    # A second run of the same version writes the same.
    run([tools / command[0], *command[1:], "--output-reproducible", "-o", path, environment / "bin/python"])
    found = json.loads(path.read_text())
    for component in found["components"]:
        # Where a wheel lay on this host is nobody's business.
        references = [each for each in component.get("externalReferences", ()) if not each["url"].startswith("file:")]
        component["externalReferences"] = references
    for name, about in tomllib.loads(_VENDORED.read_text()).items():
        purl = f"pkg:npm/{name.replace('@', '%40')}@{about['version']}"
        digest = {"alg": "SHA-256", "content": about["sha256"]}
        component = {"type": "library", "bom-ref": purl, "name": name, "version": about["version"], "purl": purl}
        found["components"].append({**component, "hashes": [digest]})
    # pyproject.toml takes it from another file, where the program does not look.
    found["metadata"]["component"]["version"] = version
    names = {component["name"].lower().replace("_", "-") for component in found["components"]}
    if lacking := {"aiohttp", "llama-cpp-python", "marked"} - names:
        raise ReleaseError(f"{path} lacks {', '.join(sorted(lacking))}")
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path
