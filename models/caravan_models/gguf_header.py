"""Reads the beginning of a GGUF file: its metadata without the long lists, and what tensors it has.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may come from anywhere, so every
length is checked before it is believed.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from caravan_models.errors import FetchError, FetchProblem

ARCHITECTURE = "general.architecture"
# The tensor that every such head has.
_OF_HEAD = b".nextn.eh_proj.weight"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMENSIONS, _MOST_NAME = 1 << 16, 1 << 20, 8, 1 << 16

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, without lists; and the number of weights in the file.

    ``has_head``: some are of a layer that predicts tokens after the next one (multi-token prediction).
    """

    metadata: Mapping[str, Value]
    parameter_count: int
    has_head: bool

    def text(self, key: str) -> str:
        """Return a text of the metadata, empty if there is none."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | None:
        """Return a whole number of the metadata, None if there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_header(path: Path) -> GgufHeader:
    """Read the file's header. Raises FetchError if it is no GGUF file, OSError if it cannot be read."""
    return _read(path, last="")


def read_architecture(path: Path) -> str:
    """Read the architecture only, which comes before long lists. Raises what `read_header` raises."""
    return _read(path, last=ARCHITECTURE).text(ARCHITECTURE)


def _read(path: Path, last: str) -> GgufHeader:
    if path.exists() and not path.is_file():
        # To open a pipe would wait for a writer.
        raise FetchError(FetchProblem.NOT_GGUF, f"{path} is no file")
    with path.open("rb") as file:
        try:
            return _Reader(file, path.stat().st_size).header(last)
        except (struct.error, ValueError, OverflowError) as error:
            raise FetchError(
                FetchProblem.NOT_GGUF, f"{path} is no whole GGUF file: {error}; get it again, or name another file"
            ) from error


class _Reader:
    """Reads values one after another."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def header(self, last: str) -> GgufHeader:
        """Read up to the key ``last``, or all."""
        if self._file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not one of {_VERSIONS}")
        tensors = self._count(_MOST_TENSORS, "tensors")
        keys = self._count(_MOST_KEYS, "keys")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key, kind = self._string(), self._number("<I")
            value = self._value(kind)
            if value is not None:
                metadata[key] = value
            if key == last:
                return GgufHeader(metadata, 0, has_head=False)
        found = [self._tensor() for _ in range(tensors)]
        has_head = any(name.endswith(_OF_HEAD) for name, _ in found)
        return GgufHeader(metadata, sum(weights for _, weights in found), has_head)

    def _tensor(self) -> tuple[bytes, int]:
        """Return the name of a tensor and the number of its weights."""
        name = self._read(self._count(_MOST_NAME, "bytes of a name"))
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        lengths = [self._number("<Q") for _ in range(dimensions)]
        self._skip(struct.calcsize("<IQ"))
        return name, math.prod(lengths)

    def _value(self, kind: int) -> Value | None:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._skip_array()
            return None
        if kind not in _FORMATS:
            raise ValueError(f"a value has the type {kind}")
        return self._unpacked(_FORMATS[kind])

    def _skip_array(self) -> None:
        kind, count = self._number("<I"), self._count(self._size, "entries")
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._count(self._size, "bytes of a text"))
        elif kind in _FORMATS:
            self._skip(count * struct.calcsize(_FORMATS[kind]))
        else:
            raise ValueError(f"a list has the type {kind}")

    def _string(self) -> str:
        return self._read(self._count(self._size, "bytes of a text")).decode(errors="replace")

    def _count(self, most: int, what: str) -> int:
        count = self._number("<Q")
        if count > most:
            raise ValueError(f"it names {count} {what}")
        return count

    def _number(self, form: str) -> int:
        value: int
        (value,) = struct.unpack(form, self._read(struct.calcsize(form)))
        return value

    def _unpacked(self, form: str) -> Value:
        value: Value
        (value,) = struct.unpack(form, self._read(struct.calcsize(form)))
        return value

    def _read(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise ValueError("it ends early")
        return data

    def _skip(self, count: int) -> None:
        """Go on without reading; a file that ends before is noticed."""
        if self._file.tell() + count > self._size:
            raise ValueError("it ends early")
        self._file.seek(count, 1)
