"""`caravan serve` divides the host among its shards."""

import os
import subprocess

import pytest

from caravan_serve.cli import device_shares, find_devices, host_shares

CORES = len(os.sched_getaffinity(0))
BOTH = ["--threads", str(max(1, CORES // 2)), "--cache-ram", "4096"]


@pytest.mark.parametrize(
    ("shards", "flags", "environment", "shares"),
    [
        (1, [], {}, []),
        (2, ["-m", "x.gguf"], {}, BOTH),
        (2, ["-t", "3"], {}, BOTH[2:]),
        (2, ["--threads=3"], {}, BOTH[2:]),
        (2, [], {"CARAVAN_THREADS": "3"}, BOTH[2:]),
        (2, ["-cram", "100"], {}, BOTH[:2]),
        (2, [], {"CARAVAN_CACHE_RAM": "100"}, BOTH[:2]),
    ],
)
def test_each_shard_gets_its_share_of_what_the_user_has_not_set(
    shards: int, flags: list[str], environment: dict[str, str], shares: list[str]
) -> None:
    assert host_shares(shards, flags, environment) == shares


def test_the_memory_is_the_default_of_a_shard() -> None:
    from caravan_shard.config import ShardConfig

    assert host_shares(1, [], {}) == []
    assert host_shares(2, [], {})[-1] == str(ShardConfig(backend="fake").cache_ram // 2)


@pytest.mark.parametrize(
    ("devices", "shards", "shares"),
    [
        ([], 2, [[], []]),
        (["A", "B"], 2, [["--device", "A"], ["--device", "B"]]),
        (["A", "B", "C"], 2, [["--device", "A,C"], ["--device", "B"]]),
        (["A"], 2, [["--device", "A"], ["--device", "A"]]),
        (["A", "B"], 3, [["--device", "A"], ["--device", "B"], ["--device", "A"]]),
    ],
)
def test_each_shard_gets_devices_of_its_own_where_there_are_enough(
    devices: list[str], shards: int, shares: list[list[str]]
) -> None:
    assert device_shares(devices, shards) == shares


@pytest.mark.parametrize(
    ("shards", "flags", "environment"),
    [
        (1, ["-ngl", "99"], {}),
        (2, ["-ngl", "0"], {}),
        (2, ["--gpu-layers=0"], {}),
        (2, [], {"CARAVAN_GPU_LAYERS": "0"}),
        (2, ["--backend", "fake"], {}),
        (2, [], {"CARAVAN_BACKEND": "fake"}),
        (2, ["-ngl", "99", "--device=CUDA1"], {}),
        (2, ["-ngl", "99"], {"CARAVAN_DEVICE": "CUDA1"}),
    ],
)
def test_devices_are_not_divided_where_that_is_not_wanted(
    shards: int, flags: list[str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: pytest.fail("no devices are looked for"))
    assert find_devices(shards, flags, environment) == []


def test_devices_to_divide_are_those_that_a_shard_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = subprocess.CompletedProcess([], 0, stdout="CUDA0\t8192 MiB\ta GPU\nCUDA1\t8192 MiB\ta GPU\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: listing)
    for flags, environment in (
        ([], {}),
        (["-ngl", "99"], {}),
        (["-ngl", "0", "-ngl", "99"], {"CARAVAN_GPU_LAYERS": "0"}),
        ([], {"CARAVAN_GPU_LAYERS": "-1"}),
    ):
        assert find_devices(2, flags, environment) == ["CUDA0", "CUDA1"]
