"""Rows that stand in a prompt in place of tokens."""

from array import array
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caravan.errors import RequestError
from caravan.prompt_rows import values_of_rows
from caravan_dialects.media.file import are_within
from caravan_proto.limits import MAX_EMBEDDING_VALUE
from caravan_scheduler.core import media


class Embeddings(media.Embeddings):
    """Rows that a model reads in place of tokens: ``count`` of ``size`` little-endian 32-bit floats. See `of`.

    ``id``: a digest of size and values.
    """

    __slots__ = ()

    @classmethod
    def of(cls, rows: Any) -> Self:
        """Return the embeddings of an array [tokens, size] of floats. Raises RequestError."""
        count, size, data = values_of_rows(np.asarray(rows))
        check_values("embeddings", data)
        return cls.of_bytes(count, size, data)

    @property
    def rows(self) -> NDArray[np.float32]:
        """The values [tokens, size]."""
        return np.frombuffer(self.data, "<f4").reshape(self.count, self.size)


def check_values(name: str, data: bytes) -> None:
    """Raise RequestError unless all of ``data``, 32-bit floats, may be embeddings. ``name``: of what has them."""
    if not are_within(array("f", data), MAX_EMBEDDING_VALUE):
        raise RequestError(f"{name} must have values between -{MAX_EMBEDDING_VALUE:g} and {MAX_EMBEDDING_VALUE:g}")


def embeddings_of(value: Any) -> Embeddings | None:
    """Return the embeddings that ``value`` is, which may be an array of floats; else None. Raises RequestError."""
    if isinstance(value, Embeddings):
        return value
    if isinstance(value, np.ndarray) and value.ndim and np.issubdtype(value.dtype, np.floating):
        return Embeddings.of(value)
    return None
