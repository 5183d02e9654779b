"""The store for asyncio."""

import asyncio
from pathlib import Path

from caravan_dialects.conversations.nodes import Head, Node, Position, Transaction
from caravan_dialects.conversations.store import Store, StoreSettings


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
