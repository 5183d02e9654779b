"""The flags that set up the store of conversations."""

from pathlib import Path

import pytest

from caravan_dialects.conversations.database import StateFileError
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_router.cli import startup_problem
from caravan_router.config import RouterConfig


def test_a_file_keeps_what_it_has_for_longer_than_memory() -> None:
    assert RouterConfig().store == StoreSettings(file=None, max_bytes=256 << 20, life_s=3600)
    with_file = RouterConfig(state_file="state", state_space=1).store
    assert with_file == StoreSettings(file=Path("state"), max_bytes=1 << 20, life_s=30 * 24 * 3600)
    assert RouterConfig(state_file="state", state_life_s=5).store.life_s == 5


async def test_a_broken_file_is_found_at_the_start(tmp_path: Path) -> None:
    store = Store(StoreSettings(file=tmp_path / "missing" / "state"))
    with pytest.raises(StateFileError) as caught:
        await store.open()
    assert startup_problem(RouterConfig(), caught.value).startswith("--state-file: ")
    await store.close()
