"""Which GPUs a shard uses, here made-up ones, and errors of rpc-servers, which llama.cpp would end the process for."""

import contextlib
import ctypes
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import llama_cpp
import pytest

from caravan_shard.backends.llama.devices import rpc
from caravan_shard.backends.llama.devices.devices import Device, ModelPlacement, find_devices
from caravan_shard.cli import main
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError
from caravan_testing.waiting import DEADLINE_S

DEVICES = [Device(f"CUDA{number}", "a GPU", 8 << 30, 0x1000 + number) for number in range(3)]

REGISTRY = 0x1000


def placed(devices: list[Device] = DEVICES, **flags: Any) -> Any:
    parameters = llama_cpp.llama_model_default_params()
    placement = ModelPlacement(ShardConfig(model="x.gguf", **flags), devices)
    placement.apply(parameters)
    parameters.keeps_alive = placement
    return parameters


def handles(parameters: Any) -> list[int]:
    """Return the devices up to the NULL that ends them."""
    array = ctypes.cast(parameters.devices, ctypes.POINTER(ctypes.c_void_p))
    found: list[int] = []
    while (handle := array[len(found)]) is not None:
        found.append(handle)
    return found


def test_without_flags_llama_cpp_chooses() -> None:
    parameters = placed()
    assert parameters.n_gpu_layers == 0
    assert parameters.split_mode == llama_cpp.LLAMA_SPLIT_MODE_LAYER
    assert not parameters.devices
    assert not parameters.tensor_split
    assert placed(gpu_layers=-1).n_gpu_layers == 10_000


def test_flags_choose_devices_and_how_they_share_the_model() -> None:
    parameters = placed(device="CUDA2, CUDA0", split_mode="row", tensor_split="3,1.5", main_gpu=1, gpu_layers=7)
    assert handles(parameters) == [0x1002, 0x1000]
    assert parameters.split_mode == llama_cpp.LLAMA_SPLIT_MODE_ROW
    assert parameters.main_gpu == 1
    assert parameters.n_gpu_layers == 7
    most = llama_cpp.llama_max_devices()
    assert parameters.tensor_split[:most] == [3, 1.5, *[0] * (most - 2)]
    assert handles(placed(device="none")) == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"device": "CUDA0,ROCm1"}, "'ROCm1' is not there. llama.cpp has: CUDA0, CUDA1, CUDA2"),
        ({"device": "CUDA1", "main_gpu": 1}, "main-gpu must be below the number of devices, 1. Given: 1"),
        ({"tensor_split": "1,1,1,1"}, "a proportion for each device, of which there are 3"),
    ],
)
def test_what_is_not_there_cannot_be_chosen(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError) as caught:
        placed(**flags)
    assert says in str(caught.value)


def test_more_devices_than_llama_cpp_has_room_for_are_refused() -> None:
    devices = [Device(f"RPC{number}", "a server", 8 << 30, 0x1000 + number) for number in range(16)]
    with pytest.raises(StartupError, match=r"fewer than 16 devices\. There are 16: pass --device"):
        placed(devices, rpc="a:1", gpu_layers=-1)
    assert len(handles(placed(devices, gpu_layers=-1, device="RPC3,RPC15"))) == 2


@pytest.mark.parametrize("text", ["1,x", "-1,2", "0,0", "nan", "inf,1"])
def test_proportions_must_be_numbers(text: str) -> None:
    with pytest.raises(ValueError, match="tensor-split"):
        ShardConfig(model="x.gguf", tensor_split=text)


def test_devices_are_listed_one_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "caravan_shard", "--list-devices"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [device.name for device in find_devices()]


class FakeLibrary(SimpleNamespace):
    """llama.cpp's functions that add servers. ``added`` and ``registered`` say what it was called with."""

    def __init__(self, *, has_rpc: bool = True, has_devices: bool = True) -> None:
        self.added: list[str] = []
        self.registered: list[int | None] = []

        def add_server(address: bytes) -> int | None:
            self.added.append(address.decode())
            return REGISTRY if has_devices else None

        self.add_server = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(add_server)
        address = ctypes.cast(self.add_server, ctypes.c_void_p).value
        super().__init__(
            ggml_backend_reg_by_name=lambda name: 0x2000 if has_rpc and name == b"RPC" else None,
            ggml_backend_reg_get_proc_address=lambda _reg, name: (
                address if name == b"ggml_backend_rpc_add_server" else 0
            ),
            ggml_backend_register=lambda registry: self.registered.append(registry.value),
        )


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return use(monkeypatch, FakeLibrary())


def use(monkeypatch: pytest.MonkeyPatch, library: FakeLibrary) -> FakeLibrary:
    monkeypatch.setattr(rpc, "libggml", library)
    return library


def hello(major: int = 7, minor: int = 0, size: int = 28) -> bytes:
    return struct.pack("<QBBB25x", size, major, minor, 3)


@contextlib.contextmanager
def rpc_server(answer: bytes) -> Iterator[str]:
    """Run a server that serves one client at a time, and gives ``answer`` to whatever it sends; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        if connection.recv(64):
                            connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_servers_that_answer_are_added_in_their_order(library: FakeLibrary) -> None:
    with rpc_server(hello()) as first, rpc_server(hello()) as second:
        rpc.add_rpc_servers([second, first])
    assert library.added == [second, first]
    assert library.registered == [REGISTRY, REGISTRY]


def test_without_servers_the_library_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLibrary(has_rpc=False))
    rpc.add_rpc_servers([])


def test_a_library_without_rpc_is_an_error_that_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeLibrary(has_rpc=False))
    with pytest.raises(StartupError, match=r"built with RPC: `caravan build-llama`"):
        rpc.add_rpc_servers(["127.0.0.1:1"])


def test_a_server_that_cannot_be_reached_is_named(library: FakeLibrary) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StartupError, match=f"cannot reach the rpc-server {address}: Connection refused"):
        rpc.add_rpc_servers([address])
    assert not library.added


def test_a_server_that_serves_another_shard_is_named(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "_PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"{address} is busy .* one client at a time"):
            rpc.add_rpc_servers([address])
        # The server is sent nothing that it would answer later, when nobody listens any more.
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(64) == b""
    assert not library.added


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 100, hello(size=4)])
def test_other_servers_are_no_rpc_servers(library: FakeLibrary, answer: bytes) -> None:
    with rpc_server(answer) as address, pytest.raises(StartupError, match=f"{address} is no rpc-server"):
        rpc.add_rpc_servers([address])
    assert not library.added


@pytest.mark.parametrize(("major", "minor"), [(6, 0), (8, 0), (7, 1)])
def test_another_version_of_the_protocol_is_refused(library: FakeLibrary, major: int, minor: int) -> None:
    with rpc_server(hello(major, minor)) as address, pytest.raises(StartupError, match=r"this shard 7\.0") as caught:
        rpc.add_rpc_servers([address])
    assert f"{address} speaks version {major}.{minor}.3 of its protocol" in str(caught.value)
    assert not library.added


def test_a_server_without_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = use(monkeypatch, FakeLibrary(has_devices=False))
    with rpc_server(hello()) as address, pytest.raises(StartupError, match=f"{address} offers no device"):
        rpc.add_rpc_servers([address])
    assert not library.registered


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:0", "host:65536", "::1:5", "[::1]:5", "a:1,,b:2", "a:x"])
def test_servers_are_hosts_with_ports(text: str) -> None:
    with pytest.raises(ValueError, match="rpc must be host:port"):
        ShardConfig(model="x.gguf", rpc=text, gpu_layers=-1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"rpc": "a:1,b:2,a:1", "gpu_layers": -1}, "a server twice"),
        ({"rpc": "a:1", "gpu_layers": 0}, "rpc-servers would hold no layer: pass another -ngl"),
        ({"rpc": "a:1", "gpu_layers": -1, "device": "none"}, "rpc-servers would hold no layer"),
        ({"rpc": "a:1", "gpu_layers": -1, "split_mode": "row"}, "rpc-servers hold whole layers: pass -sm layer"),
        ({"rpc": "a:1", "gpu_layers": -1, "split_mode": "tensor"}, "Given: tensor"),
    ],
)
def test_flags_that_leave_a_server_without_layers_are_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ShardConfig(model="x.gguf", **flags)


def test_servers_are_separated_by_commas() -> None:
    config = ShardConfig(model="x.gguf", rpc="10.0.0.1:50052, worker:50053", gpu_layers=20)
    assert config.rpc_servers == ["10.0.0.1:50052", "worker:50053"]
    assert config.uses_gpus
    assert ShardConfig(model="x.gguf", rpc="a:1").gpu_layers is None
    assert ShardConfig(model="x.gguf").rpc_servers == []


def test_devices_of_bad_addresses_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--list-devices", "--rpc", "nowhere"])
    assert ended.value.code == 2
    assert "rpc must be host:port" in capsys.readouterr().err


def test_devices_of_a_server_that_cannot_be_added_are_an_error(
    library: FakeLibrary, capsys: pytest.CaptureFixture[str]
) -> None:
    with rpc_server(b"") as address:
        assert main(["--list-devices", f"--rpc={address}"]) == 2
    assert f"caravan-shard: error: {address} is no rpc-server" in capsys.readouterr().err
    assert not library.added
