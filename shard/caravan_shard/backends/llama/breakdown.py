"""Asks llama.cpp how much memory a model and its context take in each kind of buffer.

The function is C++ and returns a ``std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>`` by value, from
llama.cpp's ``src/llama-ext.h``. Here it is called by its mangled name, and the map is read as libstdc++ lays it out
(``bits/stl_tree.h``): a header whose parent is the root of a tree of nodes, each with its value behind its links.
"""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libllama

from caravan_shard.memory_need import HOST

_FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"
# enum ggml_backend_dev_type: GPUs, and those that share the host's memory.
_GPU_TYPES = (1, 2)
# More than there are kinds of buffers.
_MOST_KINDS = 256


class _Tree(ctypes.Structure):
    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_int),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("color", ctypes.c_int),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("model", ctypes.c_size_t),
        ("context", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferUse:
    """Bytes in one kind of buffer. ``place``: a device's name or `HOST`.

    ``mappable``: weights in it may be pages of the file. Others are copies in another order.
    """

    place: str
    mappable: bool
    model: int
    context: int
    compute: int


def memory_breakdown(context: Any) -> list[BufferUse] | None:
    """Return what ``context``, a llama_context, and its model take; None if this build of llama.cpp does not tell.

    Its nodes, some hundred bytes, are not freed: whose they are, only C++ knows.
    """
    function = getattr(libllama, _FUNCTION, None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_void_p]
    function.restype = _Tree
    tree = function(context)
    # libc++ has another layout, whose last fields are not written.
    if not (0 < tree.count <= _MOST_KINDS and tree.color == 0 and tree.root):
        return None
    return [_use(node) for node in _nodes(tree.root)]


def _nodes(address: int | None) -> Iterator[Any]:
    if address:
        node = _Node.from_address(address)
        yield from _nodes(node.left)
        yield node
        yield from _nodes(node.right)


def _use(node: Any) -> BufferUse:
    kind = ctypes.c_void_p(node.buffer_type)
    libllama.ggml_backend_buft_is_host.restype = ctypes.c_bool
    libllama.ggml_backend_buft_get_device.restype = ctypes.c_void_p
    libllama.ggml_backend_dev_name.restype = ctypes.c_char_p
    is_host = bool(libllama.ggml_backend_buft_is_host(kind))
    device = ctypes.c_void_p(libllama.ggml_backend_buft_get_device(kind))
    on_device = not is_host and device.value and libllama.ggml_backend_dev_type(device) in _GPU_TYPES
    return BufferUse(
        place=libllama.ggml_backend_dev_name(device).decode() if on_device else HOST,
        mappable=is_host,
        model=node.model,
        context=node.context,
        compute=node.compute,
    )
