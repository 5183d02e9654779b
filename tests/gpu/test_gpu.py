"""A model on the GPUs of this host: `make test-gpu`, with a llama.cpp that is built for them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from caravan_shard.backends.llama.devices.devices import Device, find_devices, first_devices
from caravan_testing.shard_models import DEMO_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_moe import write_tiny_moe

pytestmark = pytest.mark.gpu

PROMPTS = ("The capital of France is", "Once upon a time there was", "List three facts about clocks:", "def add(a, b):")
NEW_TOKENS = 32
# Logits of two tokens that are closer than this count as equal: a GPU adds in another order than a CPU, and its
# products have 16 bits or fewer.
TIE_LOGITS = 0.75
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def devices() -> list[Device]:
    found = first_devices()
    assert found, "llama.cpp finds no GPU: build it with CMAKE_ARGS=-DGGML_CUDA=on or the like, see docs/operations.md"
    print(*(f"{device.name}: {device.description}, {device.total_bytes >> 20} MiB" for device in found), sep="\n")
    return found


@contextmanager
def driver(layers: int) -> Iterator[ModelDriver]:
    found = ModelDriver(fetched(DEMO_MODEL), ctx_size=4096, gpu_layers=layers, device="" if layers else "none")
    try:
        yield found
    finally:
        found.backend.close()


def test_greedy_texts_are_those_of_the_cpu_but_for_ties() -> None:
    with driver(-1) as on_gpu:
        prompts = [on_gpu.tokens(prompt) for prompt in PROMPTS]
        on_gpu.engine.release_all()
        texts = [on_gpu.alone(tokens, NEW_TOKENS) for tokens in prompts]
    with driver(0) as on_cpu:
        on_cpu.tie_logits = TIE_LOGITS
        for tokens, text in zip(prompts, texts, strict=True):
            on_cpu.check_same(tokens, on_cpu.alone(tokens, NEW_TOKENS), text)


def test_the_speeds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with driver(-1) as on_gpu:
        prompt = on_gpu.tokens("word " * 512)
        on_gpu.alone(prompt, 1)
        started = monotonic()
        on_gpu.alone(prompt, 1)
        prefill_s = monotonic() - started
        started = monotonic()
        text = on_gpu.alone(prompt[:4], 128)
        decode_s = monotonic() - started
    assert len(text) == 128
    with capsys.disabled():
        print(f"\nprefill {len(prompt) / prefill_s:.0f} tokens/s, decode {len(text) / decode_s:.0f} tokens/s")


@pytest.mark.parametrize("left_mib", [4096, 400, 250, 120, 20])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_what_is_fitted_loads_and_leaves_its_margin(
    kind: str, left_mib: int, devices: list[Device], tmp_path: Path
) -> None:
    """As if the first GPU had but ``left_mib`` MiB for the shard."""
    model = fetched(DEMO_MODEL) if kind == "dense" else write_tiny_moe(tmp_path / "moe.gguf")
    first = next(device for device in find_devices() if device.name == devices[0].name)
    target = max(0, (first.free_bytes >> 20) - left_mib)
    flags = ["--device", first.name, "--fit-target", str(target), "-np", "2"]
    command = [sys.executable, "-m", "caravan_shard", "-m", str(model), *flags]
    done = subprocess.run([*command, "--estimate"], capture_output=True, text=True, timeout=600, check=True)
    planned: dict[str, Any] = json.loads(done.stdout)
    assert planned["devices"].get(first.name, 0) <= left_mib * MIB
    # Loading it takes what was planned, and what the driver keeps for itself.
    program = (
        "import json, sys\n"
        "from caravan_shard.config import ShardConfig\n"
        "from caravan_shard.backends.llama.devices.devices import find_devices\n"
        "from caravan_shard.service.loading import backend_loader\n"
        "backend = backend_loader(ShardConfig(**json.loads(sys.argv[1])))()\n"
        "print({device.name: device.free_bytes for device in find_devices()}[sys.argv[2]])\n"
        "backend.close()\n"
    )
    config = {"model": str(model), "device": first.name, "fit_target": str(target), "parallel": 2}
    loaded = subprocess.run(
        [sys.executable, "-c", program, json.dumps(config), first.name],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert loaded.returncode == 0, loaded.stderr
    taken = first.free_bytes - int(loaded.stdout.splitlines()[-1])
    print(f"{kind}, {left_mib} MiB: planned {planned['devices']}, taken {taken >> 20} MiB with the driver's own")
