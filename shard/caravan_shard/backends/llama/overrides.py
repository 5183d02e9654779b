"""Tells llama.cpp which tensors lie in which buffers, whatever else it would choose."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libggml

from caravan_shard.backends.base import StartupError
from caravan_shard.placement_flags import TensorOverride


class _Override(ctypes.Structure):
    """A ``llama_model_tensor_buft_override``."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def buffer_types() -> dict[str, int]:
    """Return the type of buffer of each device of llama.cpp, which must be initialized, by its name."""
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    libggml.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
    libggml.ggml_backend_buft_name.restype = ctypes.c_char_p
    libggml.ggml_backend_buft_name.argtypes = [ctypes.c_void_p]
    found: dict[str, int] = {}
    for index in range(libggml.ggml_backend_dev_count()):
        kind = libggml.ggml_backend_dev_buffer_type(libggml.ggml_backend_dev_get(index))
        if kind:
            found[libggml.ggml_backend_buft_name(kind).decode()] = kind
    return found


def override_array(overrides: Sequence[TensorOverride], known: Mapping[str, int]) -> Any:
    """Return llama.cpp's array of overrides, which ends with NULL; None if there are none.

    Raises StartupError for a buffer that is not ``known``. The array must live until the model is loaded.
    """
    if not overrides:
        return None
    unknown = [one.buffer_type for one in overrides if one.buffer_type not in known]
    if unknown:
        raise StartupError(
            f"override-tensor: there is no buffer {unknown[0]!r}. llama.cpp has: {', '.join(sorted(known))}"
        )
    rows = [_Override(one.pattern.encode(), known[one.buffer_type]) for one in overrides]
    return (_Override * (len(rows) + 1))(*rows, _Override(None, None))
