"""A shard whose layers are on two rpc-servers of llama.cpp, as `caravan serve --rpc` starts it."""

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from caravan_testing.rpc_process import RpcServer
from caravan_testing.serve_process import generate, serve
from caravan_testing.waiting import DEADLINE_S, wait_until

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
