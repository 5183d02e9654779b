"""What travels to the host: the repository and what `pack` has made, which together must stay below a limit."""

import subprocess
from collections.abc import Mapping

from gpu.kit.places import CARRIED, ROOT, KitError

LIMIT = 64 << 20


def travelling() -> dict[str, int]:
    """Return the bytes of each part."""
    parts = {"the repository": _repository_bytes()}
    for path in sorted(CARRIED.iterdir()) if CARRIED.is_dir() else ():
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        parts[path.name] = sum(file.stat().st_size for file in files)
    return parts


def table(parts: Mapping[str, int], limit: int = LIMIT) -> str:
    """Return a line for each part and their sum. Raises KitError if that is more than ``limit``."""
    total = sum(parts.values())
    lines = [f"{size / 2**20:8.1f} MiB  {name}" for name, size in {**parts, "together": total}.items()]
    if total > limit:
        message = f"too much travels, {(total - limit) / 2**20:.1f} MiB above {limit / 2**20:.0f}:\n" + "\n".join(lines)
        raise KitError(message)
    return "\n".join([*lines, f"{(limit - total) / 2**20:8.1f} MiB  left of {limit / 2**20:.0f}"])


def _repository_bytes() -> int:
    """Return the bytes of the files that git has, or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = {ROOT / name for name in listed.stdout.split("\0") if name}
    return sum(file.lstat().st_size for file in files if file.is_file())
