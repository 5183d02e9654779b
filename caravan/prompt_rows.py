"""Embeddings of an array, without NumPy: a client of servers may have none."""

import struct
from array import array
from typing import Any

from caravan.errors import RequestError
from caravan_scheduler.core.media import Embeddings

_WIDE = frozenset({"f", "d"})
_HALF = "e"


def embeddings_of_rows(rows: Any) -> Embeddings:
    """Return the embeddings of an array or tensor [tokens, size] of floats. Raises RequestError."""
    return rows if isinstance(rows, Embeddings) else Embeddings.of_bytes(*values_of_rows(rows))


def values_of_rows(rows: Any) -> tuple[int, int, bytes]:
    """Return how many rows there are, the size of each, and their values as little-endian 32-bit floats.

    ``rows``: what has a buffer, such as an array of NumPy, or a tensor of PyTorch. Raises RequestError.
    """
    given = rows.detach().cpu().float().numpy() if hasattr(rows, "detach") else rows
    try:
        view = memoryview(given)
    except (TypeError, ValueError, BufferError):
        raise RequestError(f"embeddings must be an array of floats [tokens, size]. Given: {rows!r:.80}") from None
    given_shape = view.shape or ()
    shape = given_shape[1:] if len(given_shape) == 3 and given_shape[0] == 1 else given_shape
    if view.format not in {*_WIDE, _HALF} or len(shape) != 2 or 0 in shape:
        kind = getattr(given, "dtype", view.format)
        raise RequestError(f"embeddings must be floats [tokens, size]. Given: {kind} {list(given_shape)}")
    count, size = shape
    data = view.tobytes()
    if view.format == "f":
        return count, size, data
    wide = struct.unpack(f"{count * size}e", data) if view.format == _HALF else array("d", data)
    return count, size, array("f", wide).tobytes()
