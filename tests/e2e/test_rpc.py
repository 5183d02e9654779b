"""Layers on rpc-servers of llama.cpp, as `caravan serve --rpc` starts them, and what --fit chooses for them."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout

from caravan_testing.programs import Program, address_of, program, url_of
from caravan_testing.rpc_process import RpcServer
from caravan_testing.serve_process import generate, serve
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, fetched
from caravan_testing.shard_tiny_moe import LAYER_EXPERT_BYTES, LAYERS, write_tiny_moe
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

pytestmark = pytest.mark.rpc

# A busy host may take more than the usual 30 s to start a shard again.
GRACE = ("--shard-grace-s", "240")
FLAGS = ("-np", "4", "-c", "4096", "-t", "1", "-fa", "on", "--log-level", "debug")
PROMPTS = ("Write about rivers.", "The history of bread begins", "List three facts about clocks:", "Once upon a time")
LONG = "Once upon a time there was a small dog who"
NEW_TOKENS = 24
LONG_TOKENS = 300


@pytest.fixture
def servers() -> Iterator[list[RpcServer]]:
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(RpcServer())
            stack.callback(started[-1].kill)
        yield started


def rpc_flags(servers: list[RpcServer]) -> tuple[str, ...]:
    return ("--rpc", ",".join(server.address for server in servers), "--gpu-layers", "-1")


def texts(url: str) -> list[str]:
    return [generate(url, prompt, NEW_TOKENS)["generated_text"] for prompt in PROMPTS]


def test_layers_on_two_servers_give_the_answers_of_the_cpu(servers: list[RpcServer]) -> None:
    with serve(*FLAGS, *rpc_flags(servers)) as served:
        remote = texts(served.url)
        listing = [sys.executable, "-m", "caravan_shard", "--list-devices", "--rpc", servers[0].address]
        second = subprocess.run(listing, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert texts(served.url) == remote
    log = "".join(served.log)
    for server in servers:
        assert f"[{server.address}] model buffer size" in log
        assert f"[{server.address}] KV buffer size" in log
    assert second.returncode == 2
    assert "one client at a time" in second.stderr
    with serve(*FLAGS) as served:
        assert texts(served.url) == remote
    listed = subprocess.run(listing, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert [line.split("\t")[::2] for line in listed.stdout.splitlines()] == [["RPC0", servers[0].address]]


def requests_of(url: str) -> list[str]:
    """Return the state of each request in progress."""
    with urllib.request.urlopen(f"{url}/v1/requests") as reply:
        return [entry["state"] for entry in json.load(reply)["data"]]


def test_a_request_outlives_an_rpc_server(servers: list[RpcServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    with serve(*FLAGS, *GRACE, *rpc_flags(servers)) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, served.url, LONG, LONG_TOKENS)
        wait_until(lambda: requests_of(served.url), "the request runs", lambda found: found == ["running"])
        servers[1].kill()
        served.wait("unhealthy")
        with urllib.request.urlopen(f"{served.url}/readyz") as reply:
            assert reply.status == 200
        servers[1].start()
        details = answer.result()["details"]
        assert details["generated_tokens"] == LONG_TOKENS or details["finish_reason"] == "eos_token"
        served.wait("healthy")
    assert any("exit=SIGABRT" in line for line in served.log)


async def keep_asking(url: str, number: int, answers: list[int], failures: list[str], ended: asyncio.Event) -> None:
    """Ask one request after another, and note the number of tokens of each answer, or why there is none."""
    body = {"prompt": PROMPTS[number], "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    async with ClientSession(timeout=ClientTimeout(total=300)) as session:
        while not ended.is_set():
            try:
                async with session.post(f"{url}/v1/completions", json=body) as reply:
                    answer = await reply.json()
                    assert reply.status == 200, answer
                    answers.append(answer["usage"]["completion_tokens"])
            except (ClientError, TimeoutError, AssertionError) as error:
                failures.append(repr(error))


async def test_two_shards_with_a_worker_each_lose_one_under_load_and_no_request(
    servers: list[RpcServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the chart runs a pool with `hosts: 2`: who restarts a worker that is gone starts its shard again, too."""
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    sockets = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]

    def shard(number: int) -> AbstractAsyncContextManager[Program]:
        model = str(fetched(WORDS_MODEL))
        flags = (f"--address={sockets[number]}", "--model", model, *FLAGS, *rpc_flags([servers[number]]))
        return program("caravan_shard", *flags)

    async with AsyncExitStack() as stack:
        shards = [await stack.enter_async_context(shard(number)) for number in range(2)]
        for started in shards:
            await address_of(started)
        listed = [f"--shard={address}" for address in sockets]
        router = await stack.enter_async_context(program("caravan_serve", "router", "--port=0", *listed, *GRACE))
        url = await url_of(router)
        answers: list[int] = []
        failures: list[str] = []
        ended = asyncio.Event()
        clients = [
            asyncio.create_task(keep_asking(url, number, answers, failures, ended)) for number in range(len(PROMPTS))
        ]

        async def until_more_answers(what: str) -> None:
            least = len(answers) + 2 * len(clients)
            await eventually(lambda: len(answers), f"{what} answers", lambda count: count >= least or bool(failures))

        await until_more_answers("two shards give")
        await asyncio.to_thread(servers[0].kill)
        await shards[0].process.wait()
        await until_more_answers("the other shard gives")
        await asyncio.to_thread(servers[0].start)
        again = await stack.enter_async_context(shard(0))
        await address_of(again)
        await until_more_answers("both shards give")
        ended.set()
        await asyncio.gather(*clients)
    assert failures == []
    assert set(answers) == {NEW_TOKENS}


MIB = 1 << 20
FIT_FLAGS = ("-np", "2", "-t", "1", "-fa", "on")


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    started = RpcServer()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_moe(tmp_path_factory.mktemp("models") / "moe.gguf")


def estimate(model: Path, server: RpcServer, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "caravan_shard", "-m", str(model), "--rpc", server.address, "--estimate"]
    done = subprocess.run([*command, *FIT_FLAGS, *flags], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def card(free: dict[str, Any], mib: int) -> tuple[str, str]:
    """Return the flags that leave ``mib`` MiB of the device to the shard."""
    return "--fit-target", str((free["free"]["devices"]["RPC0"] >> 20) - mib)


def test_all_of_it_lies_on_a_device_with_room_for_it(server: RpcServer) -> None:
    found = estimate(fetched(DEMO_MODEL), server)
    assert found["chosen"]["gpu_layers"] == found["chosen"]["of_layers"] == 31
    # The context that it was trained with.
    assert found["chosen"]["cells"] == 8192
    parts = found["parts"]
    assert parts["RPC0"]["cells"] == 8192 * 30 * 3 * 64 * 2 * 2
    assert "cells" not in parts["host"]
    assert found["fits"]


def test_cells_then_layers_are_given_up_as_the_card_gets_smaller(server: RpcServer) -> None:
    model = fetched(DEMO_MODEL)
    whole = estimate(model, server)
    given_up = []
    for size in (400, 260, 150, 100):
        found = estimate(model, server, *card(whole, size))
        assert found["devices"]["RPC0"] <= size * MIB
        chosen = found["chosen"]
        given_up.append((chosen["gpu_layers"], chosen["cells"]))
        assert chosen["gpu_layers"] == 31 or chosen["cells"] == 4096
    assert given_up == sorted(given_up, reverse=True)
    assert given_up[0] == (31, 8192)
    assert given_up[-1][0] < 10
    none = estimate(model, server, *card(whole, 5))
    assert none["chosen"]["gpu_layers"] == 0
    assert none["devices"] == {}
    assert estimate(model, server, "--fit", "off", *card(whole, 5))["chosen"]["gpu_layers"] == 31


def test_experts_are_given_up_before_layers(server: RpcServer, moe: Path) -> None:
    whole = estimate(moe, server, "-c", "512")
    assert whole["chosen"]["experts_on_host"] == 0
    all_experts = LAYERS * LAYER_EXPERT_BYTES
    assert whole["parts"]["RPC0"]["weights"] > all_experts
    least = -(-whole["devices"]["RPC0"] // MIB)
    half = estimate(moe, server, "-c", "512", *card(whole, least - (all_experts // 2 >> 20)))
    assert half["chosen"]["gpu_layers"] == LAYERS + 1
    assert half["chosen"]["experts_on_host"] == LAYERS // 2
    # What lies on the host is what the flag would leave there.
    by_flag = estimate(moe, server, "-c", "512", "--n-cpu-moe", str(LAYERS // 2))
    assert by_flag["devices"] == half["devices"]
    assert by_flag["chosen"]["experts_on_host"] == LAYERS // 2
    none = estimate(moe, server, "-c", "512", "--cpu-moe")
    assert none["parts"]["RPC0"]["weights"] == whole["parts"]["RPC0"]["weights"] - all_experts
    named = estimate(moe, server, "-c", "512", "-ot", r"\.ffn_(up|down|gate)_exps=CPU")
    assert named["devices"] == none["devices"]


_FULL = """
import sys
from dataclasses import replace
from caravan_shard.backends.llama.devices.devices import first_devices
from caravan_shard.backends.llama.devices.plan import checked, plan_load
from caravan_shard.config import ShardConfig

config = ShardConfig(model=sys.argv[1], rpc=sys.argv[2], gpu_layers=int(sys.argv[3]), ctx_size=512, flash_attn="on")
devices = [replace(device, free_bytes=16 << 20) for device in first_devices(config.rpc_servers)]
checked(plan_load(config, devices))
"""


@pytest.mark.parametrize(("layers", "fits"), [(-1, False), (0, True)])
def test_layers_that_do_not_fit_are_refused_with_what_to_pass(
    layers: int, fits: bool, server: RpcServer, moe: Path
) -> None:
    """On a card of 16 MiB. In a process of its own, since llama.cpp keeps the device."""
    command = [sys.executable, "-c", _FULL, str(moe), server.address, str(layers)]
    if layers == 0:
        command[-2:] = ["", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode == 0) == fits, done.stderr
    if not fits:
        says = r"moe\.gguf needs \d+ MiB of RPC0's memory \(.*\), and 16 MiB are free: pass fewer -ngl, .*--allow-"
        assert re.search(says, done.stderr), done.stderr


def test_a_device_takes_what_was_estimated_and_answers_the_same(moe: Path) -> None:
    server = RpcServer()
    try:
        found = estimate(moe, server, "-c", "16384", "--n-cpu-moe", "2")
        before = resident(server)
        with serve(*FIT_FLAGS, "--rpc", server.address, "-c", "16384", "--n-cpu-moe", "2", models=(moe,)) as served:
            split = generate(served.url, "abc", 16)["generated_text"]
            taken = resident(server) - before
        with serve(*FIT_FLAGS, "--device", "none", "-c", "16384", models=(moe,)) as served:
            assert generate(served.url, "abc", 16)["generated_text"] == split
    finally:
        server.kill()
    # Short prompts do not use all of the compute buffers.
    parts = found["parts"]["RPC0"]
    assert 0.95 * (parts["weights"] + parts["cells"]) < taken < 1.05 * sum(parts.values()) + 16 * MIB, (taken, parts)


def resident(server: RpcServer) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) << 10
