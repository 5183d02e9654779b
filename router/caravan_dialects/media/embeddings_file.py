"""Reads embeddings from a file of NumPy or PyTorch, without either. Only the processes that decode files import it.

NumPy's is a line that says what follows. PyTorch's is an archive with a pickle, which is read without any class or
function of its own: nothing in it can be called.
"""

import ast
import io
import math
import pickle
import struct
import sys
import zipfile
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from caravan_dialects.media.file import MAX_EMBEDDINGS_BYTES, MediaFileError, Reason, are_within
from caravan_proto.limits import MAX_EMBEDDING_VALUE, MAX_MEDIA_BYTES
from caravan_scheduler.core.media import SAMPLE_BYTES

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
# NumPy pads the line to 64 bytes; it has three entries.
_MOST_HEADER_BYTES = 1024
_NPY_KINDS = {"<f2": "float16", "<f4": "float32", "<f8": "float64"}
_TORCH_KINDS = {
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
}
_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_HALVES = 1 << 16


class _Values(NamedTuple):
    """Values of a ``kind``, little-endian, row by row."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


def read_embeddings(data: bytes, row_size: int) -> bytes:
    """Return rows of ``row_size`` little-endian 32-bit floats. Raises MediaFileError, and whatever a broken file makes
    the libraries raise.
    """
    if len(data) > MAX_EMBEDDINGS_BYTES:
        raise MediaFileError(Reason.SIZE, f"must have at most {MAX_EMBEDDINGS_BYTES} bytes. Given: {len(data)}")
    if data.startswith(_NPY):
        values = _of_numpy(data)
    elif data.startswith(_ZIP):
        values = _of_torch(data)
    else:
        raise MediaFileError(Reason.FORMAT, "must be a file of numpy.save (.npy) or torch.save, in base64")
    rows, size = values.shape[-2:] if values.shape[:-2] in ((), (1,)) and len(values.shape) > 1 else (0, 0)
    if rows < 1 or size != row_size:
        raise MediaFileError(
            Reason.SIZE, f"must have the shape [tokens, {row_size}] for this model. Given: {list(values.shape)}"
        )
    if rows * row_size * SAMPLE_BYTES > MAX_MEDIA_BYTES:
        most = MAX_MEDIA_BYTES // (row_size * SAMPLE_BYTES)
        raise MediaFileError(Reason.SIZE, f"must have at most {most} rows. Given: {rows}")
    if len(values.data) != rows * row_size * _WIDTHS[values.kind]:
        raise MediaFileError(Reason.BROKEN, "ends before its last value, or does not end with it")
    floats = _WIDENED[values.kind](values.data)
    if not are_within(floats, MAX_EMBEDDING_VALUE):
        given = f"-{MAX_EMBEDDING_VALUE:g} and {MAX_EMBEDDING_VALUE:g}"
        raise MediaFileError(Reason.BROKEN, f"has values that are not between {given}")
    return _little(floats).tobytes()


def _of_numpy(data: bytes) -> _Values:
    wide = data[6] > 1
    start = 12 if wide else 10
    size = int.from_bytes(data[8:start], "little")
    if size > _MOST_HEADER_BYTES:
        raise MediaFileError(Reason.BROKEN, f"has a header of more than {_MOST_HEADER_BYTES} bytes")
    header = ast.literal_eval(data[start : start + size].decode("latin-1").strip())
    kind, shape = _NPY_KINDS.get(header["descr"]), header["shape"]
    if kind is None:
        raise MediaFileError(Reason.FORMAT, f"must be of float16, float32 or float64. Given: {header['descr']!s:.20}")
    if header["fortran_order"]:
        raise MediaFileError(Reason.FORMAT, "must have its rows one after another: save numpy.ascontiguousarray of it")
    return _Values(kind, _sizes(shape), data[start + size :])


class _Storage(NamedTuple):
    kind: str
    key: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_rest: Any) -> _Tensor:
    return _Tensor(storage, offset, _sizes(shape), _sizes(strides))


class _TensorReader(pickle.Unpickler):
    """Reads the pickle of one tensor. Names that it does not know end the reading: nothing is imported."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        match module_name, global_name:
            case "torch._utils", "_rebuild_tensor_v2":
                return _tensor
            case "collections", "OrderedDict":
                return dict
            case "torch", _ if global_name in _TORCH_KINDS:
                return global_name
        raise MediaFileError(
            Reason.FORMAT,
            "must be a tensor of float16, bfloat16, float32 or float64 and nothing else, such as torch.save writes "
            f"of tensor.detach().cpu(), or a .npy file. Given: {module_name:.40}.{global_name:.40}",
        )

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, *_ = pid
        return _Storage(_TORCH_KINDS[kind], key)


def _of_torch(data: bytes) -> _Values:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        # What torch.save writes is not compressed, so nothing in it is larger than it.
        members = {one.filename: one for one in archive.infolist() if one.compress_type == zipfile.ZIP_STORED}
        root = next((name[: -len("data.pkl")] for name in members if name.endswith("/data.pkl")), None)
        if root is None:
            raise MediaFileError(Reason.FORMAT, "must be a file of numpy.save (.npy) or torch.save")
        if f"{root}byteorder" in members and archive.read(f"{root}byteorder") != b"little":
            raise MediaFileError(Reason.FORMAT, "must be little-endian")
        tensor = _TensorReader(io.BytesIO(archive.read(f"{root}data.pkl"))).load()
        if not isinstance(tensor, _Tensor):
            raise MediaFileError(Reason.FORMAT, f"must be a tensor. Given: {type(tensor).__name__}")
        stored = archive.read(members[f"{root}data/{tensor.storage.key}"])
    if not _is_contiguous(tensor):
        raise MediaFileError(Reason.FORMAT, "must have its rows one after another: save tensor.contiguous()")
    width = _WIDTHS[tensor.storage.kind]
    end = tensor.offset + math.prod(tensor.shape)
    return _Values(tensor.storage.kind, tensor.shape, stored[tensor.offset * width : end * width])


def _is_contiguous(tensor: _Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return tensor.offset >= 0


def _sizes(given: Any) -> tuple[int, ...]:
    if not (isinstance(given, tuple) and all(isinstance(size, int) and size >= 0 for size in given)):
        raise MediaFileError(Reason.BROKEN, "does not say its shape")
    return given


def _of_float16(data: bytes) -> "array[float]":
    floats = array("f")
    for first in range(0, len(data), _HALVES):
        part = data[first : first + _HALVES]
        floats.extend(struct.unpack(f"<{len(part) // 2}e", part))
    return floats


def _of_bfloat16(data: bytes) -> "array[float]":
    """A bfloat16 is the first half of a float32."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[::2], data[1::2]
    return _of_float32(bytes(wide))


def _of_float32(data: bytes) -> "array[float]":
    return _little(array("f", data))


def _of_float64(data: bytes) -> "array[float]":
    return array("f", _little(array("d", data)))


def _little(floats: "array[float]") -> "array[float]":
    """Turn floats from little-endian to the host's order, or back."""
    if sys.byteorder == "big":
        floats.byteswap()
    return floats


_WIDENED: dict[str, Callable[[bytes], "array[float]"]] = {
    "float16": _of_float16,
    "bfloat16": _of_bfloat16,
    "float32": _of_float32,
    "float64": _of_float64,
}
