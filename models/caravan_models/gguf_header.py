"""Reads the beginning of a GGUF file: its metadata without the long lists, and which tensors it has.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file may come from anywhere, so every
length is checked before it is believed.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from caravan_models.errors import FetchError, FetchProblem

ARCHITECTURE = "general.architecture"
# The tensor that every such head has.
_OF_HEAD = ".nextn.eh_proj.weight"
_ALIGNMENT = "general.alignment"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})
_STRING, _ARRAY = 8, 9
# Before a text.
_LENGTH = struct.Struct("<Q")
_BLOCK_BYTES = 1 << 18
# Longer lists are left out.
_SHORT = 64
_USUAL_ALIGNMENT = 32
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMENSIONS, _MOST_NAME = 1 << 16, 1 << 20, 8, 1 << 16

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """``lengths``: of its dimensions, the one whose numbers follow each other first. ``kind``: its ``enum ggml_type``.

    ``start``: the byte of the file at which it begins.
    """

    lengths: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata by key, without lists; the short lists of whole numbers; how long each list is; and tensors by name."""

    metadata: Mapping[str, Value]
    lists: Mapping[str, tuple[int, ...]]
    list_lengths: Mapping[str, int]
    tensors: Mapping[str, GgufTensor]

    @property
    def parameter_count(self) -> int:
        """Number of weights in the file."""
        return sum(math.prod(tensor.lengths) for tensor in self.tensors.values())

    @property
    def has_head(self) -> bool:
        """Whether a layer predicts tokens after the next one (multi-token prediction)."""
        return any(name.endswith(_OF_HEAD) for name in self.tensors)

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
        lists: dict[str, tuple[int, ...]] = {}
        lengths: dict[str, int] = {}
        found: dict[str, GgufTensor] = {}
        header = GgufHeader(metadata=metadata, lists=lists, list_lengths=lengths, tensors=found)
        for _ in range(keys):
            key, kind = self._string(), self._number("<I")
            if kind == _ARRAY:
                lengths[key], numbers = self._array()
                if numbers is not None:
                    lists[key] = numbers
            else:
                metadata[key] = self._value(kind)
            if key == last:
                return header
        for _ in range(tensors):
            name, tensor = self._tensor()
            found[name] = tensor
        alignment = header.number(_ALIGNMENT) or _USUAL_ALIGNMENT
        data = -(-self._file.tell() // alignment) * alignment
        for name, tensor in found.items():
            found[name] = replace(tensor, start=data + tensor.start)
        return header

    def _tensor(self) -> tuple[str, GgufTensor]:
        """Return the name of a tensor, and the tensor, whose start is counted from where the first one begins."""
        name = self._read(self._count(_MOST_NAME, "bytes of a name")).decode(errors="replace")
        dimensions = self._number("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        lengths = tuple(self._number("<Q") for _ in range(dimensions))
        return name, GgufTensor(lengths, self._number("<I"), self._number("<Q"))

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind not in _FORMATS:
            raise ValueError(f"a value has the type {kind}")
        return self._unpacked(_FORMATS[kind])

    def _array(self) -> tuple[int, tuple[int, ...] | None]:
        """Return the length of a list, and the list if it is short and of whole numbers."""
        kind, count = self._number("<I"), self._count(self._size, "entries")
        if kind in _INTEGERS and count <= _SHORT:
            return count, tuple(self._number(_FORMATS[kind]) for _ in range(count))
        if kind == _STRING:
            self._skip_texts(count)
        elif kind in _FORMATS:
            self._skip(count * struct.calcsize(_FORMATS[kind]))
        else:
            raise ValueError(f"a list has the type {kind}")
        return count, None

    def _string(self) -> str:
        return self._read(self._count(self._size, "bytes of a text")).decode(errors="replace")

    def _skip_texts(self, count: int) -> None:
        """Go on behind ``count`` texts. Vocabularies have hundreds of thousands, so lengths are read from blocks."""
        block, place = b"", 0
        for _ in range(count):
            if place + _LENGTH.size > len(block):
                self._skip(max(0, place - len(block)))
                block, place = block[place:] + self._file.read(_BLOCK_BYTES), 0
                if len(block) < _LENGTH.size:
                    raise ValueError("it ends early")
            (length,) = _LENGTH.unpack_from(block, place)
            place += _LENGTH.size + _at_most(self._size, length, "bytes of a text")
        self._skip(place - len(block))

    def _count(self, most: int, what: str) -> int:
        return _at_most(most, self._number("<Q"), what)

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
        """Go on, or back, without reading; a file that ends before is noticed."""
        if self._file.tell() + count > self._size:
            raise ValueError("it ends early")
        self._file.seek(count, 1)


def _at_most(most: int, count: int, what: str) -> int:
    if count > most:
        raise ValueError(f"it names {count} {what}")
    return count
