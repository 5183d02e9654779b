"""Embeddings are read from the files of NumPy and PyTorch, and nothing else is."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from caravan.media import npy_of
from caravan_dialects.media.embeddings_file import read_embeddings
from caravan_dialects.media.file import MAX_EMBEDDINGS_BYTES, MediaFileError
from caravan_scheduler.core.media import Embeddings

_VALUES = np.array([[1.5, -2.0, 0.25], [3.0, 4.0, -65504.0]], np.float32)


def _npy(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


class _Named:
    """Writes a name of another module as the pickles of PyTorch have it: nothing of it is imported here."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.line = f"c{module}\n{name}\n".encode()
        self.arguments = arguments


def _pickled(value: Any) -> bytes:
    """Return the opcodes of a value, by the rules of protocol 2."""
    match value:
        case _Named():
            return value.line
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            return pickle.BININT + struct.pack("<i", value)
        case str():
            return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()
        case tuple():
            return pickle.MARK + b"".join(map(_pickled, value)) + pickle.TUPLE
        case _:
            raise AssertionError(value)


def _called(function: _Named, *arguments: bytes) -> bytes:
    return _pickled(function) + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE


def _torch(
    data: bytes,
    shape: tuple[int, ...] = (2, 3),
    *,
    storage: str = "FloatStorage",
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
    made_by: tuple[str, str] = ("torch._utils", "_rebuild_tensor_v2"),
    compression: int = zipfile.ZIP_STORED,
) -> bytes:
    """Return the archive that torch.save writes of a tensor."""
    steps = strides or tuple(int(np.prod(shape[place + 1 :])) for place in range(len(shape)))
    stored = _pickled(("storage", _Named("torch", storage), "0", "cpu", len(data))) + pickle.BINPERSID
    tensor = _called(
        _Named(*made_by),
        stored,
        *map(_pickled, (offset, shape, steps, False)),
        _called(_Named("collections", "OrderedDict")),
    )
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("rows/data.pkl", pickle.PROTO + b"\x02" + tensor + pickle.STOP)
        archive.writestr("rows/byteorder", "little")
        archive.writestr("rows/data/0", data)
        archive.writestr("rows/version", "3\n")
    return file.getvalue()


def _bfloat16(values: Any) -> bytes:
    halves: bytes = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return halves


@pytest.mark.parametrize(
    "file",
    [
        _npy(_VALUES),
        _npy(_VALUES.astype(np.float16)),
        _npy(_VALUES.astype(np.float64)),
        _npy(_VALUES[None]),
        npy_of(Embeddings.of_bytes(2, 3, _VALUES.tobytes())),
        _torch(_VALUES.tobytes()),
        _torch(_VALUES.astype(np.float16).tobytes(), storage="HalfStorage"),
        _torch(_VALUES.astype(np.float64).tobytes(), (1, 2, 3), storage="DoubleStorage"),
        _torch(bytes(12) + _VALUES.tobytes() + bytes(4), offset=3),
    ],
)
def test_embeddings_are_those_of_the_file(file: bytes) -> None:
    assert read_embeddings(file, 3) == _VALUES.tobytes()


def test_bfloat16_becomes_float32() -> None:
    values = np.array([[1.5, -2.0, 0.25]], np.float32)
    assert read_embeddings(_torch(_bfloat16(values), (1, 3), storage="BFloat16Storage"), 3) == values.tobytes()


def test_many_rows_of_16_bits_are_read_in_parts() -> None:
    values = (np.arange(90_000) % 1000).astype(np.float16).reshape(-1, 3)
    assert read_embeddings(_npy(values), 3) == values.astype(np.float32).tobytes()


_ARRAY: Callable[..., bytes] = lambda values: _npy(np.array(values, np.float32))  # noqa: E731


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (b"text", r"numpy.save \(.npy\) or torch.save"),
        (pickle.dumps([1.0]), "torch.save"),
        (bytes(MAX_EMBEDDINGS_BYTES + 1), "at most"),
        (_ARRAY([1.0, 2.0, 3.0]), r"\[tokens, 3\] for this model. Given: \[3\]"),
        (_ARRAY([[1.0, 2.0]]), r"Given: \[1, 2\]"),
        (_ARRAY([[[1.0] * 3]] * 2), r"Given: \[2, 1, 3\]"),
        (_npy(np.empty((0, 3), np.float32)), r"Given: \[0, 3\]"),
        (_ARRAY([[1.0, 2.0, float("nan")]]), "not between"),
        (_ARRAY([[1.0, 2.0, float("inf")]]), "not between"),
        (_npy(np.array([[1.0, 2.0, 1e300]])), "not between"),
        (_ARRAY([[1.0, 2.0, 65505.0]]), "not between"),
        (_npy(np.ones((2, 3), np.int64)), "float16, float32 or float64. Given: <i8"),
        (_npy(np.ones((2, 3), ">f4")), "Given: >f4"),
        (_npy(np.asfortranarray(_VALUES)), "ascontiguousarray"),
        (_npy(_VALUES)[:-1], "last value"),
        (_npy(_VALUES) + b"\0", "last value"),
        (b"\x93NUMPY\x01\x00\xff\xff", "header"),
        (_npy(np.zeros((1_400_000, 3), np.float16)), "at most 1310720 rows"),
        (_torch(_VALUES.tobytes(), made_by=("builtins", "eval")), "Given: builtins.eval"),
        (_torch(_VALUES.tobytes(), made_by=("torch._utils", "_rebuild_parameter")), r"tensor.detach\(\)"),
        (_torch(_VALUES.tobytes(), storage="LongStorage"), "Given: torch.LongStorage"),
        (_torch(_VALUES.tobytes(), strides=(1, 2)), "contiguous"),
        (_torch(_VALUES.tobytes(), offset=3), "last value"),
        (_torch(_VALUES.tobytes(), compression=zipfile.ZIP_DEFLATED), "torch.save"),
    ],
)
def test_what_is_no_file_of_embeddings_is_refused_by_name(file: bytes, problem: str) -> None:
    with pytest.raises(MediaFileError, match=problem):
        read_embeddings(file, 3)
