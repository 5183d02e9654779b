"""Lets shards draft whatever it costs. Their own rule learns what drafts are worth from the time that steps take."""

import os
from functools import partialmethod
from pathlib import Path

import pytest

from caravan_shard.engine.drafts import Drafting

_FOLDER = Path(__file__).parent / "drafting_always"


def draft_always(patch: pytest.MonkeyPatch) -> None:
    """Let shards draft wherever they can, in this process and in those that it starts."""
    patch.setattr(Drafting, "__init__", partialmethod(Drafting.__init__, always=True))
    patch.setenv("PYTHONPATH", str(_FOLDER), prepend=os.pathsep)
