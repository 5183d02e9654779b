"""Lets llama.cpp compute layers on other hosts, where its rpc-servers run, and serves this host's devices to one."""

import ctypes
import logging
import socket
import struct
from collections.abc import Sequence

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libggml

from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)

# From ggml-rpc.cpp and ggml-rpc.h of the pinned llama.cpp: the first message of a client, which has its capabilities of
# RDMA, here none, and the version of the protocol in the answer.
_HELLO = struct.pack("<BQ24x", 14, 24)
_ANSWER = struct.Struct("<QBBB25x")
_ANSWER_BYTES = 28
_MAJOR, _MINOR = 7, 0
_PATIENCE_S = 5.0
# Of enum ggml_backend_dev_type.
_CPU = 0


def add_rpc_servers(servers: Sequence[str]) -> None:
    """Register the devices of ``servers`` with llama.cpp, which must be initialized. Raises StartupError."""
    if not servers:
        return
    add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(_function("ggml_backend_rpc_add_server"))
    for server in servers:
        _check(server)
        registry = add_server(server.encode())
        if not registry:
            raise StartupError(f"the rpc-server {server} offers no device")
        libggml.ggml_backend_register(ctypes.c_void_p(registry))
        _log.info("rpc-server added", extra={"server": server})


def serve_devices(address: str, threads: int, handles: Sequence[int]) -> None:
    """Serve the devices of llama.cpp's ``handles`` to one shard at a time, at an IPv4 address and port.

    ``threads``: of the CPU, if it is among the devices. Returns only if the server cannot start, after llama.cpp has
    printed why. Raises StartupError if llama.cpp is built without RPC.
    """
    start = ctypes.CFUNCTYPE(
        None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    )(_function("ggml_backend_rpc_start_server"))
    start(address.encode(), None, threads, len(handles), (ctypes.c_void_p * len(handles))(*handles))


def cpu_handle() -> int:
    """Return llama.cpp's handle of the CPU. llama.cpp must be initialized."""
    libggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    handle: int = libggml.ggml_backend_dev_by_type(_CPU)
    return handle


def _function(name: str) -> int:
    """Return the address of a function of llama.cpp's RPC. Raises StartupError."""
    libggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    libggml.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    backend = libggml.ggml_backend_reg_by_name(b"RPC")
    if not backend:
        raise StartupError("it needs a llama.cpp that is built with RPC: `caravan build-llama` builds and installs one")
    address: int = libggml.ggml_backend_reg_get_proc_address(ctypes.c_void_p(backend), name.encode())
    return address


def _check(server: str) -> None:
    """Require that an rpc-server answers, since llama.cpp ends the process if none does, and waits for a busy one."""
    try:
        _await_turn(server)
        answer = _answer(server)
    except OSError as error:
        raise StartupError(f"cannot reach the rpc-server {server}: {error.strerror or error}") from error
    size, major, minor, patch = _ANSWER.unpack(answer) if len(answer) == _ANSWER.size else (0, 0, 0, 0)
    if size != _ANSWER_BYTES:
        raise StartupError(f"{server} is no rpc-server, or it is built from another llama.cpp")
    if major != _MAJOR or minor > _MINOR:
        raise StartupError(
            f"the rpc-server {server} speaks version {major}.{minor}.{patch} of its protocol, and this shard "
            f"{_MAJOR}.{_MINOR}: build both from one llama.cpp"
        )


def _await_turn(server: str) -> None:
    """Wait until the server has closed a connection without a message, which it does when it serves nobody else.

    A busy server would answer a message later, and end when it finds the connection closed. Raises OSError if nothing
    listens, StartupError if the server stays busy.
    """
    with _connect(server) as connection:
        connection.shutdown(socket.SHUT_WR)
        try:
            connection.recv(1)
        except TimeoutError:
            raise StartupError(
                f"the rpc-server {server} is busy for {_PATIENCE_S:g} s: it serves one client at a time, and another "
                "shard may use it"
            ) from None


def _answer(server: str) -> bytes:
    """Return what the server answers to a client's first message; less than an answer if it does not know it."""
    answer = b""
    with _connect(server) as connection:
        try:
            connection.sendall(_HELLO)
            while len(answer) < _ANSWER.size and (received := connection.recv(_ANSWER.size - len(answer))):
                answer += received
        except (TimeoutError, ConnectionError):
            pass
    return answer


def _connect(server: str) -> socket.socket:
    """Return a connection to ``server``, by IPv4, which is all that llama.cpp speaks. Raises OSError."""
    host, _, port = server.partition(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE_S)
        connection.connect((host, int(port)))
    except OSError:
        connection.close()
        raise
    return connection
