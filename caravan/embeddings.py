"""Rows that stand in a prompt in place of tokens."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caravan.errors import RequestError


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Rows that a model reads in place of tokens: ``count`` of ``size`` little-endian 32-bit floats. See `of`.

    ``id``: a digest of size and values.
    """

    id: bytes = field(repr=False)
    count: int
    size: int
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, rows: Any) -> Self:
        """Return the embeddings of an array [tokens, size] of floats. Raises RequestError."""
        found = np.asarray(rows)
        if found.ndim != 2 or not found.size or not np.issubdtype(found.dtype, np.floating):
            raise RequestError(f"embeddings must be floats [tokens, size]. Given: {found.dtype} {list(found.shape)}")
        values = np.ascontiguousarray(found, "<f4")
        if not np.isfinite(values).all():
            raise RequestError("embeddings must be finite")
        count, size = found.shape
        return cls.of_bytes(count, size, values.tobytes())

    @classmethod
    def of_bytes(cls, count: int, size: int, data: bytes) -> Self:
        """Return the embeddings with these values."""
        digest = hashlib.sha256(f"embeddings {count} {size}\n".encode())
        digest.update(data)
        return cls(digest.digest(), count, size, data)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The values [tokens, size]."""
        return np.frombuffer(self.data, "<f4").reshape(self.count, self.size)

    @property
    def size_bytes(self) -> int:
        """How much memory they take."""
        return len(self.data)


def embeddings_of(value: Any) -> Embeddings | None:
    """Return the embeddings that ``value`` is, which may be an array of floats; else None. Raises RequestError."""
    if isinstance(value, Embeddings):
        return value
    if isinstance(value, np.ndarray) and value.ndim and np.issubdtype(value.dtype, np.floating):
        return Embeddings.of(value)
    return None
