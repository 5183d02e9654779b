"""The models of the comparison, which are fetched or made once."""

import subprocess
import sys
from pathlib import Path

from bench.paths import DEMO_MODEL, ROOT, BenchError
from caravan_testing.requantised import requantise

_FETCHED = {
    "smollm2-q4_1": DEMO_MODEL,
    "gemma-3-270m": DEMO_MODEL.with_name("gemma-3-270m-q4_k_m.gguf"),
}
# Twice as fast as its source, so that what a server adds to each step shows more.
_REQUANTISED = DEMO_MODEL.with_name("SmolLM2-135M-Instruct.Q4_0.gguf")
NAMES = (*_FETCHED, "smollm2-q4_0")


def model(name: str) -> Path:
    """Return the GGUF file of a model in `NAMES`, or the file ``name``. Raises BenchError if there is none."""
    if name == "smollm2-q4_0":
        return _requantised(model("smollm2-q4_1"))
    if name not in _FETCHED:
        if not Path(name).is_file():
            message = f"no model {name!r}: give a GGUF file or one of {', '.join(NAMES)}"
            raise BenchError(message)
        return Path(name).resolve()
    path = _FETCHED[name]
    if not path.is_file():
        command = [sys.executable, str(ROOT / "deploy/setup/fetch_model.py"), str(path)]
        if subprocess.run(command, check=False).returncode != 0:
            message = f"cannot fetch {path.name}"
            raise BenchError(message)
    return path


def _requantised(source: Path) -> Path:
    if not _REQUANTISED.is_file():
        unfinished = _REQUANTISED.with_suffix(".unfinished")
        try:
            requantise(source, unfinished)
        except OSError as error:
            raise BenchError(str(error)) from error
        unfinished.rename(_REQUANTISED)
    return _REQUANTISED
