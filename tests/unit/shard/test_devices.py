"""Which GPUs a shard uses. Without any, the devices here are made up and no model is loaded on them."""

import ctypes
import subprocess
import sys
from typing import Any

import llama_cpp
import pytest

from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.devices.devices import Device, ModelPlacement, find_devices
from caravan_shard.config import ShardConfig
from caravan_testing.waiting import DEADLINE_S

DEVICES = [Device(f"CUDA{number}", "a GPU", 8 << 30, 0x1000 + number) for number in range(3)]


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
