"""Tells model files apart without reading all of them."""

import hashlib
from pathlib import Path

_HEADER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the file's size, its first MiB and 16 of its blocks: equal for copies of one file.

    Raises OSError.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
        for block in range(1, _BLOCKS + 1):
            file.seek(max(0, size * block // _BLOCKS - _BLOCK_BYTES))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
