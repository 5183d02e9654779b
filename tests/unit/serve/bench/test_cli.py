"""The command line of the bench, and the CPU time of processes."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unit.serve.bench.conftest import ToyServer

from caravan_serve.bench.cli import main
from caravan_serve.bench.runner import NoSuchProcessError, cpu_seconds, with_children


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "localhost:1"),
        ("--url", "http://127.0.0.1:1", "--rate", "0"),
        ("--url", "http://127.0.0.1:1", "--concurrency", "0"),
        ("--url", "http://127.0.0.1:1", "--api", "generate", "--workload", "n"),
        ("--url", "http://127.0.0.1:1", "--top-k", "40"),
        ("--url", "http://127.0.0.1:1", "--min-p", "0.1"),
        ("--url", "http://127.0.0.1:1", "--api", "generate", "--whole"),
        ("--url", "http://127.0.0.1:1", "--workload", "stall", "--whole"),
        ("--url", "http://127.0.0.1:1", "--workload", "decode", "--api", "embeddings"),
        ("--url", "http://127.0.0.1:1", "--temperature", "1", "--api", "embeddings"),
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2


async def test_the_report_is_printed_and_written_as_json(
    toy: ToyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "report.json"
    arguments = ["--url", toy.url, "--requests", "4", "--tokens", "3", "--pid", str(os.getpid()), "--json", str(path)]
    assert await asyncio.to_thread(main, arguments) == 0
    report = json.loads(await asyncio.to_thread(path.read_text))
    assert report["phases"][0]["summary"]["output_tokens"] == 12
    assert report["phases"][0]["cpu"]["server_s"] >= 0
    printed = capsys.readouterr().out
    assert "plain: 4/4 requests" in printed
    assert "TTFT" in printed


async def test_a_run_without_a_completed_request_shows_the_errors_and_fails(
    toy: ToyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.mode = "429"
    arguments = ["--url", toy.url, "--requests", "2", "--warmup", "0"]
    assert await asyncio.to_thread(main, arguments) == 1
    assert "2 x overloaded (429), the first: HTTP 429" in capsys.readouterr().out


async def test_the_stall_workload_prints_the_worst_gap(toy: ToyServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["--url", toy.url, "--workload", "stall", "--words", "9"]) == 0
    assert "worst gap" in capsys.readouterr().out


def test_a_process_that_does_not_run_is_an_error() -> None:
    with pytest.raises(NoSuchProcessError, match="is not running"):
        cpu_seconds([2**22 + 1])


def test_the_children_of_a_process_are_found() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in with_children([os.getpid()])
        assert cpu_seconds([child.pid]) >= 0
    finally:
        child.communicate(b"\n")
