"""Requests that need the store of conversations while it cannot be used."""

import asyncio
import sqlite3
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from caravan_dialects.conversations.nodes import Transaction
from caravan_dialects.conversations.store import Store, StoreError, StoreSettings
from caravan_testing.http_server import named_events, serving
from caravan_testing.scripted_engine import WordEngine
from caravan_testing.waiting import eventually

CONVERSATION, RESPONSE = "/v1/conversations/conv_1", "/v1/responses/resp_1"


ITEMS = [{"role": "user", "content": "a"}]


REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/conversations", {}),
    ("GET", CONVERSATION, None),
    ("POST", CONVERSATION, {"metadata": {}}),
    ("DELETE", CONVERSATION, None),
    ("GET", f"{CONVERSATION}/items", None),
    ("POST", f"{CONVERSATION}/items", {"items": ITEMS}),
    ("GET", f"{CONVERSATION}/items/msg_1", None),
    ("DELETE", f"{CONVERSATION}/items/msg_1", None),
    ("POST", f"{CONVERSATION}/fork", {}),
    ("POST", f"{CONVERSATION}/rewind", {"turns": 1}),
    ("POST", f"{CONVERSATION}/shift", {"drop": 0}),
    ("POST", f"{CONVERSATION}/edit", {"operations": []}),
    ("GET", f"{CONVERSATION}/export", None),
    ("GET", RESPONSE, None),
    ("DELETE", RESPONSE, None),
    ("POST", f"{RESPONSE}/cancel", None),
    ("GET", f"{RESPONSE}/input_items", None),
    ("POST", "/v1/responses", {"input": "a", "previous_response_id": "resp_1"}),
    ("POST", "/v1/responses", {"input": "a", "conversation": "conv_1", "stream": True}),
    ("POST", "/v1/responses/input_tokens", {"input": "a", "conversation": "conv_1"}),
]


def damage(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("DROP TABLE nodes")
        database.execute("DROP TABLE heads")


async def test_requests_that_need_the_store_are_told_to_come_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "state"
    async with serving(WordEngine(), store=Store(StoreSettings(place=file))) as service:
        await service.reply("/v1/conversations", {})
        await asyncio.to_thread(damage, file)
        for method, path, body in REQUESTS:
            async with service.client.request(method, path, json=body) as response:
                assert response.status == 503, (method, path, await response.text())
                assert response.headers["Retry-After"] == "1"
                assert (await response.json())["error"]["code"] == "store_unavailable"
        assert service.is_idle()
        # What was computed is answered, and says that it cannot be continued.
        answered = await service.reply("/v1/responses", {"input": "a"})
        assert (answered["status"], answered["store"]) == ("completed", False)
        streamed = await service.post("/v1/responses", {"input": "a", "stream": True})
        last = named_events(await streamed.text())[-1]
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
        await service.reply("/v1/responses", {"input": "a", "store": False})
        await service.reply("/v1/completions", {"prompt": "a"})
    failures = [record for record in caplog.records if record.name == "caravan_dialects.conversations.store"]
    assert len(failures) == len(REQUESTS) + 2
    assert all("no such table" in record.getMessage() for record in failures)
    assert not any(record.exc_info for record in caplog.records)


async def test_a_conversation_does_not_lose_a_turn_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(WordEngine()) as service:
        conversation = (await service.reply("/v1/conversations", {}))["id"]

        async def fail(*_: object) -> bool:
            raise StoreError

        monkeypatch.setattr(Store, "commit", fail)
        refused = await service.post("/v1/responses", {"input": "a", "conversation": conversation})
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert (await refused.json())["error"]["code"] == "not_stored"


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_is_in_progress_until_the_store_has_its_end(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, storing, decided = Store.commit, list[str](), asyncio.Event()

    async def refuse_nodes(store: Store, owner: str, transaction: Transaction) -> bool:
        if transaction.node is None:
            return await commit(store, owner, transaction)
        storing.append(transaction.node.id)
        await decided.wait()
        raise StoreError

    async with serving(WordEngine()) as service, AsyncExitStack() as ending:
        ending.callback(decided.set)

        async def found(status: int = 200) -> Any:
            async with service.client.get(f"/v1/responses/{storing[0]}") as response:
                assert response.status == status, await response.text()
                return await response.json()

        conversation = (await service.reply("/v1/conversations", {}))["id"]
        monkeypatch.setattr(Store, "commit", refuse_nodes)
        body = {"input": "a", "conversation": conversation, "background": background}
        asked = asyncio.create_task(service.post("/v1/responses", body))
        await eventually(lambda: storing, "it is being stored")
        shown = await found()
        assert (shown["status"], shown["usage"], shown["completed_at"]) == ("in_progress", None, None)
        assert shown["output"][0]["content"][0]["text"] == "Hello you"
        decided.set()
        assert (await asked).status == (200 if background else 503)
        if background:
            failed = await eventually(found, "it ends", lambda one: one["status"] != "in_progress")
            assert (failed["status"], failed["error"]["code"]) == ("failed", "not_stored")
        else:
            await found(404)
