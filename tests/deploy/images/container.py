"""Containers that runc starts from images of buildah, confined as in a Kubernetes pod with the strictest settings.

The root is read-only, the user is the image's, without capabilities. Each container has its own processes and mounts
and shares the host's network, so that tests reach it at 127.0.0.1.
"""

import contextlib
import json
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = {"destination": "/proc", "type": "proc", "source": "proc"}
_TMPFS = ["nosuid", "nodev", "mode=1777"]
_DEVICES = [
    {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
    {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": _TMPFS},
    {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": _TMPFS},
]
_NAMESPACES = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]


def buildah(*arguments: str) -> str:
    """Run buildah and return what it prints."""
    return subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=True, timeout=600).stdout


def image_config(image: str) -> dict[str, Any]:
    """Return the image's configuration in the form of Docker, which has health checks beside what OCI has."""
    config: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    return config


@dataclass(slots=True, kw_only=True)
class Container:
    """A running container. ``log`` has all that it writes."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as its user."""
        return subprocess.run(
            ["runc", "exec", self.name, *command], capture_output=True, text=True, check=False, timeout=60
        )

    def signal(self, name: str) -> None:
        """Send a signal to process 1."""
        subprocess.run(["runc", "kill", self.name, name], check=True, timeout=60)

    def wait(self, within_s: float) -> int:
        """Wait until the container ends, and return its exit status."""
        return self.process.wait(within_s)


@contextlib.contextmanager
def container(
    image: str,
    folder: Path,
    flags: Sequence[str],
    mounts: Mapping[str, Path] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Container]:
    """Run ``image`` with ``flags``; kill it at the end if it still runs.

    ``mounts``: host paths by the path in the container, read-only. ``variables`` win over the image's own.
    """
    name = f"caravan-{uuid.uuid4().hex[:12]}"
    bundle = folder / name
    bundle.mkdir()
    working = buildah("from", "--pull-never", image).strip()
    try:
        root = Path(buildah("mount", working).strip())
        spec = _spec(image_config(image), root, flags, mounts or {}, variables or {})
        (bundle / "config.json").write_text(json.dumps(spec))
        log = bundle / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["runc", "run", "--bundle", str(bundle), name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        running = Container(name=name, log=log, process=process)
        try:
            yield running
        finally:
            subprocess.run(["runc", "kill", name, "KILL"], capture_output=True, check=False, timeout=60)
            process.wait(60)
            subprocess.run(["runc", "delete", "--force", name], capture_output=True, check=False, timeout=60)
    finally:
        buildah("rm", working)


def _spec(
    config: dict[str, Any], root: Path, flags: Sequence[str], mounts: Mapping[str, Path], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the runtime configuration of the OCI."""
    user, group = map(int, config["User"].split(":"))
    environment = dict(pair.split("=", 1) for pair in config["Env"]) | dict(variables)
    bound = [
        {"destination": inside, "type": "bind", "source": str(outside), "options": ["rbind", "ro", "nosuid", "nodev"]}
        for inside, outside in mounts.items()
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": "caravan",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "args": [*config["Entrypoint"], *flags],
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "user": {"uid": user, "gid": group},
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "mounts": [_PROC, *_DEVICES, *bound],
        "linux": {"namespaces": _NAMESPACES, "maskedPaths": ["/proc/kcore"], "readonlyPaths": ["/proc/sys"]},
    }
