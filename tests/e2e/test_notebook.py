"""A notebook shows how far a download and a list of prompts are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_testing.serve_process import ROOT
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.stand_in_hub import TOKEN, stand_in_hub

pytestmark = pytest.mark.clients


def test_a_notebook_has_bars_for_a_download_and_for_prompts(tmp_path: Path) -> None:
    python = ROOT / ".cache/clients/notebook/bin/python"
    assert python.exists(), "no environment for notebook: run `make test-clients`"
    write_tiny_llama(tmp_path / "tiny.gguf")
    with stand_in_hub() as hub:
        hub.add("demo/tiny", {"tiny-F32.gguf": (tmp_path / "tiny.gguf").read_bytes()})
        variables = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN": TOKEN,
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        run = subprocess.run(
            [python, ROOT / "tests/e2e/clients/notebook_session.py"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    assert run.returncode == 0, run.stderr
    got = json.loads(run.stdout.splitlines()[-1])
    (download,), (prompts,), none = ([bar.replace("\u2007", " ") for bar in bars] for bars in got["bars"])
    assert "demo/tiny: 100%" in download
    assert prompts.startswith("prompts: 100%")
    assert "4/4" in prompts
    assert "tokens/s" in prompts
    assert none == []
    assert got["errors"] == ["", "", ""]
    assert got["printed"] == ["", "4\n", "LLM('hf:demo/tiny', ctx_size=512)\n"]
