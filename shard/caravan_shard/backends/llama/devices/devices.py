"""Which accelerators hold the layers of the model, in which proportions, and which tensors lie elsewhere."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libggml

from caravan_shard.backends.llama.devices.rpc import add_rpc_servers
from caravan_shard.config import ShardConfig
from caravan_shard.placement_flags import TensorOverride
from caravan_shard.startup_error import StartupError

_SPLIT_MODES = {
    "none": llama_cpp.LLAMA_SPLIT_MODE_NONE,
    "layer": llama_cpp.LLAMA_SPLIT_MODE_LAYER,
    "row": llama_cpp.LLAMA_SPLIT_MODE_ROW,
    "tensor": llama_cpp.LLAMA_SPLIT_MODE_TENSOR,
}
# enum ggml_backend_dev_type: GPUs, and those that share the host's memory.
_GPU_TYPES = (1, 2)


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


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. ``handle`` is llama.cpp's. ``free_bytes``: when it was looked at."""

    name: str
    description: str
    total_bytes: int
    handle: Any
    free_bytes: int = 0


def first_devices(rpc_servers: Sequence[str] = ()) -> list[Device]:
    """Initialize llama.cpp, and return the accelerators of this host and of ``rpc_servers``. Raises StartupError."""
    llama_cpp.llama_backend_init()
    add_rpc_servers(rpc_servers)
    return find_devices()


def drafting_devices(config: ShardConfig, devices: Sequence[Device]) -> list[str] | None:
    """Return the names of those that may hold the draft model; None for all."""
    if not config.rpc:
        return None
    # Each token of a draft would be sent there and back.
    chosen = config.device_names or [device.name for device in devices]
    return [name for name in chosen if not name.startswith("RPC")]


def find_devices() -> list[Device]:
    """Return the accelerators that llama.cpp, which must be initialized, can use, in the order in which it does."""
    libggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    libggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    libggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    handles = [libggml.ggml_backend_dev_get(index) for index in range(libggml.ggml_backend_dev_count())]
    devices = [_device(handle) for handle in handles if _type(handle) in _GPU_TYPES]
    # llama.cpp gives the first layers to rpc-servers, but registers them last.
    return sorted(devices, key=lambda device: not device.name.startswith("RPC"))


def _type(handle: Any) -> int:
    return int(libggml.ggml_backend_dev_type(ctypes.c_void_p(handle)))


def _device(handle: Any) -> Device:
    pointer = ctypes.c_void_p(handle)
    for function in (libggml.ggml_backend_dev_name, libggml.ggml_backend_dev_description):
        function.restype = ctypes.c_char_p
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    libggml.ggml_backend_dev_memory(pointer, ctypes.byref(free), ctypes.byref(total))
    return Device(
        name=libggml.ggml_backend_dev_name(pointer).decode(),
        description=libggml.ggml_backend_dev_description(pointer).decode(),
        total_bytes=total.value,
        handle=handle,
        free_bytes=free.value,
    )


class ModelPlacement:
    """The fields of llama.cpp's model parameters that place a model. Must live until the model is loaded."""

    def __init__(self, config: ShardConfig, devices: Sequence[Device]) -> None:
        """``devices``: those that there are. Raises StartupError if ``config`` names another, or another buffer."""
        layers = config.gpu_layers or 0
        self._gpu_layers = layers if layers >= 0 else 10_000
        self._split_mode = _SPLIT_MODES[config.split_mode]
        self._main_gpu = config.main_gpu
        self._devices = self._chosen(config.device_names, devices)
        used = devices if self._devices is None else [one for one in self._devices if one]
        if config.main_gpu > 0 and config.main_gpu >= len(used):
            raise StartupError(f"main-gpu must be below the number of devices, {len(used)}. Given: {config.main_gpu}")
        proportions = config.proportions
        if proportions and len(proportions) > max(1, len(used)):
            raise StartupError(
                f"tensor-split has a proportion for each device, of which there are {len(used)}. "
                f"Given: {config.tensor_split}"
            )
        most = int(llama_cpp.llama_max_devices())
        if len(used) >= most:
            raise StartupError(f"llama.cpp uses fewer than {most} devices. There are {len(used)}: pass --device")
        self._proportions = (ctypes.c_float * most)(*proportions) if proportions else None
        overrides = config.tensor_overrides
        self._overrides = override_array(overrides, buffer_types()) if overrides else None

    @staticmethod
    def _chosen(names: list[str] | None, devices: Sequence[Device]) -> Any:
        """Return llama.cpp's array of devices, which ends with NULL; None for all of them."""
        if names is None:
            return None
        by_name = {device.name: device for device in devices}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            known = ", ".join(by_name) or "none"
            raise StartupError(f"device {unknown[0]!r} is not there. llama.cpp has: {known}")
        return (ctypes.c_void_p * (len(names) + 1))(*(by_name[name].handle for name in names), None)

    def apply(self, parameters: Any) -> None:
        """Set the fields of a ``llama_model_params``."""
        parameters.n_gpu_layers = self._gpu_layers
        parameters.split_mode = self._split_mode
        parameters.main_gpu = self._main_gpu
        if self._devices is not None:
            parameters.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if self._proportions is not None:
            parameters.tensor_split = self._proportions
        if self._overrides is not None:
            parameters.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
