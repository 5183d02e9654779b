"""What a download leaves: the paths of a model's files."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A model whose files are all here. ``model`` is the first of its ``parts``, the path that llama.cpp wants.

    ``name``: under which clients find it. ``projector``: of a model that sees pictures. ``size``: bytes of all files.
    ``digest``: SHA-256 of the file; of several parts, the SHA-256 of their digests in order, as lower-case hexadecimals
    without a separator. It is empty for files that another program has put into the cache without one. ``note``: a
    sentence if the hub could not be asked.
    """

    name: str
    model: Path
    parts: tuple[Path, ...]
    projector: Path | None = None
    size: int
    digest: str
    note: str = ""


def digest_of_parts(digests: Sequence[str]) -> str:
    """Return the digest of a model whose parts have these; empty if one of them is unknown."""
    if not digests or not all(len(digest) == hashlib.sha256().digest_size * 2 for digest in digests):
        return ""
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
