"""A running server behaves as openapi.json says, with valid and invalid data: no 5xx, no undocumented reply.

``CARAVAN_SCHEMATHESIS_EXAMPLES=200 pytest tests/e2e/test_schemathesis.py`` tries more examples.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_testing.serve_process import serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

EXAMPLES = int(os.environ.get("CARAVAN_SCHEMATHESIS_EXAMPLES", "3"))
CONFIG = Path(__file__).parent / "schemathesis.toml"
COMMAND = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
TOY = ("--backend", "fake", "-np", "16", "-c", "4096", "--max-total-tokens", "128")
# Second names of routes, which the other phases try, too.
SECOND_NAMES = r"^/((chat/completions|responses|embeddings|rerank)(/.*)?|(v1/)?reranking|v1/models/.*:.*)$"
FLAGS = ["--generation-deterministic", "--no-shrink", "--request-timeout", "120", "--no-color"]


@pytest.mark.parametrize(
    ("server", "phases"),
    [
        # The toy model takes no time, so it can be tested with more phases.
        (TOY, ("fuzzing,stateful",)),
        pytest.param(TOY, ("coverage", "--exclude-path-regex", SECOND_NAMES), marks=pytest.mark.slow),
        pytest.param(
            ("-np", "16", "-c", "4096", "-t", "1", "--max-total-tokens", "24"),
            ("fuzzing",),
            marks=[pytest.mark.slow, pytest.mark.model],
        ),
    ],
    ids=["toy model", "toy model, coverage", "real model"],
)
def test_the_api_is_as_described(server: tuple[str, ...], phases: tuple[str, ...], tmp_path: Path) -> None:
    with serve(*server, "--embeddings") as served:
        command = [*COMMAND, f"{served.url}/openapi.json", *FLAGS, "--max-examples", str(EXAMPLES)]
        command += ["--phases", *phases]
        # schemathesis writes its findings to the current folder.
        environment = os.environ | {"PYTHONPATH": str(CONFIG.parent)}  # for the hooks
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
        # Check that schemathesis has tested operations at all.
        assert "Tested: " in done.stdout
        assert served.healthy()
        assert not [line for line in served.log if line.startswith("Traceback")]
