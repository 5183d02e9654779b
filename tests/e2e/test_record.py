"""A server with a real model records what it decides, and the recording is played again."""

import concurrent.futures
import gzip
import subprocess
import sys
from pathlib import Path

from caravan_testing.serve_process import generate, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched

COMMAND = [sys.executable, "-c", "from caravan_serve.commands import main; raise SystemExit(main())", "replay"]


def test_what_a_server_records_is_played_again_by_the_command(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    flags = ("--shards", "2", "--parallel", "4", "--ctx-size", "2048", "--threads", "1")
    with (
        serve(*flags, "--record", str(recording), models=(fetched(WORDS_MODEL),)) as served,
        concurrent.futures.ThreadPoolExecutor(6) as clients,
    ):
        prompts = [f"Of all the rivers of the world, number {number} is" for number in range(6)]
        answers = list(clients.map(lambda prompt: generate(served.url, prompt, 12), prompts))
    sampled = sum(answer["details"]["generated_tokens"] for answer in answers)
    ended = subprocess.run([*COMMAND, str(recording)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all are the same" in ended.stdout
    what_if = subprocess.run([*COMMAND, str(recording), "--shards", "+1"], capture_output=True, text=True, check=False)
    assert what_if.returncode == 0, what_if.stdout + what_if.stderr
    _, recorded, *_ = what_if.stdout.splitlines()
    assert recorded.split()[:5] == ["recorded", "6", "6", "0", str(sampled)]
    assert b"river" not in gzip.decompress(recording.read_bytes())
