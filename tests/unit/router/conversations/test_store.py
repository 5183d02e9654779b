"""The store for asyncio, and the flags that set it up."""

import asyncio
from pathlib import Path

import pytest

from caravan_router.cli import startup_problem
from caravan_router.config import RouterConfig
from caravan_router.conversations.database import StateFileError
from caravan_router.conversations.nodes import Head, Node, Position, Transaction
from caravan_router.conversations.store import Store, StoreSettings


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


async def test_turns_are_there_again_after_a_restart(tmp_path: Path) -> None:
    settings = StoreSettings(file=tmp_path / "state")
    store = Store(settings)
    await store.open()
    node = Node(id="resp_1", items=({"id": "msg_1"},), response=b"{}")
    head = Head(id="conv_1", created=1.0, position=Position(node="resp_1", items=1))
    assert await store.commit("a", Transaction(node=node, head=head))
    await store.close()
    again = Store(settings)
    found = await again.conversation("a", "conv_1")
    assert found is not None
    assert found[0] == head
    assert found[1].items == [{"id": "msg_1"}]
    assert await again.response("b", "resp_1") is None
    await again.close()


async def test_what_is_in_use_stays_until_the_last_user_has_ended() -> None:
    store = Store(StoreSettings(life_s=0.2))
    node = Node(id="resp_1", items=({"id": "msg_1"},), response=b"{}")
    assert await store.commit("a", Transaction(node=node))
    with store.pinning("resp_1"):
        with store.pinning("resp_1"):
            await asyncio.sleep(0.4)
            assert await store.commit("a", Transaction(node=Node(id="resp_2", items=({"id": "x"},), response=b"{}")))
        await asyncio.sleep(0.4)
        assert await store.response("a", "resp_1") is not None
    await store.close()
