"""llama.cpp's rpc-server as a process: a device that needs no GPU."""

import contextlib
import ctypes
import os
import socket
import subprocess
import sys

import llama_cpp
from llama_cpp.llama_cpp import _lib as libggml

from caravan_testing.programs import kept_ports
from caravan_testing.waiting import wait_until


class RpcServer:
    """A process on a port of its own, which it keeps when it is started again."""

    def __init__(self) -> None:
        self._kept = contextlib.ExitStack()
        (self.port,) = self._kept.enter_context(kept_ports(1))
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "caravan_testing.rpc_process", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

        def connect() -> bool:
            with socket.create_connection(("127.0.0.1", self.port)):
                return True

        wait_until(
            connect,
            f"{command} listens",
            ignoring=(ConnectionRefusedError,),
            unless=lambda: self.process.poll() is not None and "the rpc-server has ended; its message is above",
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


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
