"""llama.cpp's rpc-server on the CPU, from the libraries of the shard: ``python -m caravan_testing.rpc_server PORT``."""

import ctypes
import sys

import llama_cpp
from llama_cpp.llama_cpp import _lib as libggml

_CPU = 0
_THREADS = 1


def main() -> None:
    """Serve on 127.0.0.1 until the process is killed."""
    for name in ("ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address", "ggml_backend_dev_by_type"):
        getattr(libggml, name).restype = ctypes.c_void_p
    llama_cpp.llama_backend_init()
    backend = libggml.ggml_backend_reg_by_name(b"RPC")
    assert backend, "llama.cpp is built without RPC"
    address = libggml.ggml_backend_reg_get_proc_address(ctypes.c_void_p(backend), b"ggml_backend_rpc_start_server")
    serve = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    )(address)
    devices = (ctypes.c_void_p * 1)(libggml.ggml_backend_dev_by_type(_CPU))
    serve(f"127.0.0.1:{int(sys.argv[1])}".encode(), None, _THREADS, len(devices), devices)


if __name__ == "__main__":
    main()
