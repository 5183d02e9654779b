"""Tells model files apart at once, without reading all of them: `contents` does that, and takes longer."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_HEADER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16


def fingerprint(parts: Sequence[Path]) -> str:
    """Return the SHA-256 of each part's size, its first MiB and 16 of its blocks: equal for copies of the same files.

    Files of other weights may have an equal one. Raises OSError.
    """
    digest = hashlib.sha256()
    for part in parts:
        size = part.stat().st_size
        digest.update(str(size).encode())
        with part.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for block in range(1, _BLOCKS + 1):
                file.seek(max(0, size * block // _BLOCKS - _BLOCK_BYTES))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
