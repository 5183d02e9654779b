"""A shard whose layers are on two rpc-servers of llama.cpp, as `caravan serve --rpc` starts it.

CARAVAN_TEST_RPC_SERVER is the program ggml-rpc-server, and CARAVAN_TEST_RPC_LIBRARY the folder of a libllama that is
built with RPC, both for CPUs and from the llama.cpp of the pinned llama-cpp-python: CONTRIBUTING.md says how.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from caravan_testing.serve_process import serve

pytestmark = pytest.mark.rpc

FLAGS = ("-np", "4", "-c", "4096", "-t", "1", "-fa", "on", "--log-level", "debug")
PROMPTS = ("Write about rivers.", "The history of bread begins", "List three facts about clocks:", "Once upon a time")
LONG = "Once upon a time there was a small dog who"
NEW_TOKENS = 24
LONG_TOKENS = 300


class RpcServer:
    """A process on a port of its own, which it keeps when it is started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start the server; it ignores SIGPIPE as Python does, or it would end with a shard that is killed."""
        command = [os.environ["CARAVAN_TEST_RPC_SERVER"], "--port", str(self.port), "--threads", "1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, restore_signals=False)
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert time.monotonic() < deadline, f"{command} does not listen"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RpcServer]]:
    names = ("CARAVAN_TEST_RPC_SERVER", "CARAVAN_TEST_RPC_LIBRARY")
    assert all(os.environ.get(name) for name in names), f"set {' and '.join(names)}"
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", os.path.abspath(os.environ["CARAVAN_TEST_RPC_LIBRARY"]))
    with contextlib.ExitStack() as stack:
        started = []
        for _ in range(2):
            started.append(RpcServer())
            stack.callback(started[-1].kill)
        yield started


def rpc_flags(servers: list[RpcServer]) -> tuple[str, ...]:
    return ("--rpc", ",".join(server.address for server in servers), "--gpu-layers", "-1")


def generate(url: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}}
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=240) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def texts(url: str) -> list[str]:
    return [generate(url, prompt, NEW_TOKENS)["generated_text"] for prompt in PROMPTS]


def test_layers_on_two_servers_give_the_answers_of_the_cpu(servers: list[RpcServer]) -> None:
    with serve(*FLAGS, *rpc_flags(servers)) as served:
        remote = texts(served.url)
        listing = [sys.executable, "-m", "caravan_shard", "--list-devices", "--rpc", servers[0].address]
        second = subprocess.run(listing, capture_output=True, text=True, timeout=60, check=False)
        assert texts(served.url) == remote
    log = "".join(served.log)
    for server in servers:
        assert f"[{server.address}] model buffer size" in log
        assert f"[{server.address}] KV buffer size" in log
    assert second.returncode == 2
    assert "one client at a time" in second.stderr
    with serve(*FLAGS) as served:
        assert texts(served.url) == remote
    listed = subprocess.run(listing, capture_output=True, text=True, timeout=60, check=True)
    assert [line.split("\t")[::2] for line in listed.stdout.splitlines()] == [["RPC0", servers[0].address]]


def test_a_request_outlives_an_rpc_server(servers: list[RpcServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")
    with serve(*FLAGS, *rpc_flags(servers)) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, served.url, LONG, LONG_TOKENS)
        time.sleep(1)
        assert not answer.done()
        servers[1].kill()
        served.wait("unhealthy")
        servers[1].start()
        details = answer.result()["details"]
        assert details["generated_tokens"] == LONG_TOKENS or details["finish_reason"] == "eos_token"
        served.wait("healthy")
    assert any("exit=SIGABRT" in line for line in served.log)
