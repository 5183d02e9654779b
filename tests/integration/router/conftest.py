import os

import pytest

from caravan_router.engine.batcher import Batcher
from caravan_router.scheduling.shard.costs import ShardCosts
from caravan_router.scheduling.transfers import Transfers
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_testing import cluster
from caravan_testing.shown_prompts import shown

# Tests of text that are tests of pictures too: their prompts are shown in part, which changes no output.
_SHOWN = os.environ.get("SHOWN", "").split(",")
_WORDS, _PICTURES, _WHOLE = "words", "pictures", "whole pictures"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] in _SHOWN:
        metafunc.parametrize("prompts", [_PICTURES, _WHOLE], indirect=True)


@pytest.fixture(autouse=True)
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts be texts, or show parts of them as pictures, which may be cut or must be computed whole."""
    kind = getattr(request, "param", _WORDS)
    if kind == _WORDS:
        return
    encoder = ToyEncoder(atomic=kind == _WHOLE)
    submit = Batcher.submit
    monkeypatch.setattr(cluster, "default_encoder", lambda: ToyEncoder(atomic=kind == _WHOLE))
    monkeypatch.setattr(Batcher, "submit", lambda self, spec, *rest: submit(self, shown(spec, encoder), *rest))


@pytest.fixture
def copies_cost_as_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies and transfers cost what the router guesses before the first, whatever a busy machine would measure.

    A step takes at least its sleep, so swapping and moving are always faster than computing again.
    """
    monkeypatch.setattr(ShardCosts, "observe_copy", lambda *_, **__: None)
    monkeypatch.setattr(Transfers, "_learn", lambda *_, **__: None)
