"""For each test a stand-in hub without faults and repositories, and an empty cache."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from caravan_models.hub import HubSettings
from caravan_testing.stand_in_hub import TOKEN, StandInHub, stand_in_hub


@pytest.fixture(scope="module")
def running_hub() -> Iterator[StandInHub]:
    with stand_in_hub() as running, pytest.MonkeyPatch.context() as patch:
        # huggingface_hub's client of this process reads it when it is made.
        patch.setenv("NO_PROXY", "127.0.0.1")
        close_session()
        yield running
        close_session()


@pytest.fixture
def hub(running_hub: StandInHub) -> StandInHub:
    running_hub.reset()
    return running_hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def settings(hub: StandInHub, cache: Path) -> HubSettings:
    """Settings that try again at once."""
    return HubSettings(endpoint=hub.url, cache=cache, token=TOKEN, offline=False, pause_s=0.001, tries=3)


@pytest.fixture
def environment(hub: StandInHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the processes that the test starts to the hub."""
    for name, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(cache)), ("HF_TOKEN", TOKEN)):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
