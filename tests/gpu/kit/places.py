"""Where the kit keeps what. Needs the standard library alone, as all that runs before the environment is there."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# In an environment that the kit has made.
OWN = VENV / ".gpu-kit"
FOLDER = ROOT / ".cache" / "gpu-kit"

# What `pack` makes, and what travels with the repository.
CARRIED = FOLDER / "carried"
SOURCE = CARRIED / "llama.cpp.tar.xz"
WHEELS = CARRIED / "wheels.tar.xz"
VOCABULARY = CARRIED / "vocabulary.gguf"
PACKED = CARRIED / "packed.json"

# What is made on the host.
WORK = FOLDER / "work"
UNPACKED = WORK / "source"
UNPACKED_WHEELS = WORK / "wheels"
BUILD = WORK / "build"
MODELS = WORK / "models"
RESULTS = FOLDER / "results"


class KitError(Exception):
    """The stage cannot continue; the message says why."""


class UnfinishedError(Exception):
    """The time is over, and the same stage goes on from here when it is started again."""


def out_folder() -> Path:
    """Return the folder where results are left if no flag says another: that of the variable OUT, if it is set."""
    return Path(os.environ.get("OUT", RESULTS))
