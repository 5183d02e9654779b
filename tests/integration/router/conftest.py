import pytest

from caravan_router.scheduling.shard.costs import ShardCosts
from caravan_router.scheduling.transfers import Transfers


@pytest.fixture
def copies_cost_as_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies and transfers cost what the router guesses before the first, whatever a busy machine would measure.

    A step takes at least its sleep, so swapping and moving are always faster than computing again.
    """
    monkeypatch.setattr(ShardCosts, "observe_copy", lambda *_, **__: None)
    monkeypatch.setattr(Transfers, "_learn", lambda *_, **__: None)
