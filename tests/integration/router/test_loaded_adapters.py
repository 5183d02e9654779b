"""Adapters that are loaded and unloaded while the server runs, on toy models over real gRPC.

What the toy model computes depends on the adapter's key, so cells of another key give another text.
"""

import asyncio
import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from caravan_proto.messages.adapters import AdapterSource, adapter_key
from caravan_testing.cluster import Cluster, ClusterConfig, cluster, expected_text
from caravan_testing.waiting import eventually

PROMPT = "a prompt in common, which every adapter continues in its own way " * 3
TOKENS = 12


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "remembered"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "adapters"
    made.mkdir()
    for name in ("a", "b"):
        (made / f"{name}.gguf").write_bytes(f"weights of {name}".encode())
    (tmp_path / "outside.gguf").write_bytes(b"outside")
    (made / "link.gguf").symlink_to(tmp_path / "outside.gguf")
    (made / "damaged.gguf").write_bytes(b"damaged")
    return made


def key_of(name: str, file: Path, scale: float = 1.0) -> str:
    source = AdapterSource(name=name, path=file.name, scale=scale)
    return adapter_key(source, hashlib.sha256(file.read_bytes()).hexdigest())


async def post(session: ClientSession, running: Cluster, path: str, sent: Mapping[str, object]) -> tuple[int, str]:
    async with session.post(f"{running.url}{path}", json=sent) as response:
        return response.status, await response.text()


async def load(session: ClientSession, running: Cluster, name: str, path: str, **fields: object) -> tuple[int, str]:
    return await post(session, running, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})


async def unload(session: ClientSession, running: Cluster, name: str) -> int:
    return (await post(session, running, "/v1/unload_lora_adapter", {"lora_name": name}))[0]


async def completed(session: ClientSession, running: Cluster, model: str, tokens: int = TOKENS) -> tuple[int, Any]:
    sent = {"prompt": PROMPT, "model": model, "max_tokens": tokens, "temperature": 0}
    async with session.post(f"{running.url}/v1/completions", json=sent) as response:
        answer = await response.json()
        return response.status, answer["choices"][0]["text"] if response.status == 200 else answer["error"]["code"]


async def shown(session: ClientSession, running: Cluster) -> list[list[str]]:
    async with session.get(f"{running.url}/admin/shards") as response:
        return [[one["name"] for one in shard["adapters"]] for shard in (await response.json())["shards"]]


async def counted(session: ClientSession, running: Cluster) -> tuple[int, int]:
    """The limit and the number of loaded adapters."""
    async with session.get(f"{running.url}/info") as response:
        answer = await response.json()
        return answer["max_loras"], answer["loaded_loras"]


async def listed(session: ClientSession, running: Cluster) -> dict[str, str | None]:
    async with session.get(f"{running.url}/v1/models") as response:
        return {model["id"]: model["parent"] for model in (await response.json())["data"]}


async def test_no_adapter_reads_cells_of_another_or_of_other_bytes(folder: Path) -> None:
    a, b = folder / "a.gguf", folder / "b.gguf"
    async with cluster(ClusterConfig(shards=2, lora_dir=str(folder))) as running, ClientSession() as session:
        assert (await load(session, running, "a", "a.gguf"))[0] == 200
        assert (await load(session, running, "b", str(b)))[0] == 200
        assert (await load(session, running, "half", "a.gguf", scale=0.5))[0] == 200
        keys = {"toy": "", "a": key_of("a", a), "b": key_of("b", b), "half": key_of("half", a, 0.5)}
        texts = {name: expected_text(PROMPT, TOKENS, key) for name, key in keys.items()}
        assert len(set(texts.values())) == 4
        # At the same time on both shards, then from saved cells.
        for _ in range(3):
            answers = await asyncio.gather(*(completed(session, running, name) for name in texts))
            assert answers == [(200, text) for text in texts.values()]
        assert await listed(session, running) == {"toy": None, "a": "toy", "b": "toy", "half": "toy"}
        assert await shown(session, running) == [["a", "b", "half"]] * 2
        # Other weights under the same name, first in place, then after it was unloaded.
        a.write_bytes(b"other weights")
        status, told = await load(session, running, "a", "a.gguf")
        assert status == 400
        assert "load_inplace" in told
        assert await completed(session, running, "a") == (200, texts["a"])
        assert (await load(session, running, "a", "a.gguf", load_inplace=True))[0] == 200
        assert await completed(session, running, "a") == (200, expected_text(PROMPT, TOKENS, key_of("a", a)))
        assert await unload(session, running, "a") == 200
        assert await completed(session, running, "a") == (404, "model_not_found")
        assert await unload(session, running, "a") == 404
        a.write_bytes(b"third weights")
        assert (await load(session, running, "a", "a.gguf"))[0] == 200
        assert await completed(session, running, "a") == (200, expected_text(PROMPT, TOKENS, key_of("a", a)))
        left = [["b", "half", "a"]] * 2
        await eventually(lambda: shown(session, running), "old ones are freed", lambda found: found == left)


async def test_running_requests_end_before_an_adapter_is_freed(folder: Path) -> None:
    may_step, began = threading.Event(), threading.Event()

    def hook(batch: Any) -> None:
        if batch.adapter:
            began.set()
            may_step.wait()

    config = ClusterConfig(lora_dir=str(folder), hook=hook)
    async with cluster(config) as running, ClientSession() as session:
        assert (await load(session, running, "a", "a.gguf"))[0] == 200
        running_request = asyncio.create_task(completed(session, running, "a", 60))
        await asyncio.to_thread(began.wait)
        assert await unload(session, running, "a") == 200
        assert await completed(session, running, "a") == (404, "model_not_found")
        assert await shown(session, running) == [["a"]]
        assert await counted(session, running) == (8, 1)
        may_step.set()
        text = expected_text(PROMPT, 60, key_of("a", folder / "a.gguf"))
        assert await running_request == (200, text)
        await eventually(lambda: shown(session, running), "it is freed", lambda found: found == [[]])
        assert await counted(session, running) == (8, 0)


async def test_shards_that_join_or_start_again_have_the_adapters(folder: Path) -> None:
    async with cluster(ClusterConfig(lora_dir=str(folder))) as running, ClientSession() as session:
        assert (await load(session, running, "a", "a.gguf"))[0] == 200
        (address,) = running.servers
        text = expected_text(PROMPT, TOKENS, key_of("a", folder / "a.gguf"))
        assert await completed(session, running, "a") == (200, text)
        await running.stop_shard(address)
        await running.start_shard(address)
        assert await completed(session, running, "a") == (200, text)
        # A shard that would compute something else does not serve.
        await running.stop_shard(address)
        (folder / "a.gguf").write_bytes(b"other weights")
        await running.start_shard(address)
        await eventually(
            lambda: running.fleet.shards()[0].standing.reason,
            "it is refused",
            lambda reason: "has other bytes than the one" in reason,
        )
        assert await unload(session, running, "a") == 200
        assert await completed(session, running, "toy") == (200, expected_text(PROMPT, TOKENS))


async def test_what_one_shard_cannot_load_none_serves(folder: Path) -> None:
    async with cluster(ClusterConfig(lora_dir=str(folder), max_loras=2)) as running, ClientSession() as session:
        for name, path, told in (
            ("x", "missing.gguf", "lora_path cannot be read: No such file or directory. Given: 'missing.gguf'"),
            ("x", "../outside.gguf", "lora_path must be a file in the folder of --lora-dir. Given: '../outside.gguf'"),
            ("x", "link.gguf", "lora_path must be a file in the folder of --lora-dir"),
            ("x", ".", "lora_path must be a file in the folder of --lora-dir"),
            ("x", "", "lora_path must be the path of a file. Given: ''"),
            ("x", "damaged.gguf", "the toy model cannot use"),
            ("a b", "a.gguf", "lora_name must have 1 to 128 characters"),
            ("toy", "a.gguf", "lora_name must not be the name of another model or adapter. Given: 'toy'"),
        ):
            status, answer = await load(session, running, name, path)
            assert (status, told in answer) == (400, True), answer
        status, answer = await load(session, running, "x", "a.gguf", scale=1e9)
        assert status == 400
        assert "scale must be from -1000 to 1000. Given: 1e+09" in answer
        assert await listed(session, running) == {"toy": None}
        assert [(await load(session, running, name, "a.gguf"))[0] for name in ("x", "y", "z")] == [200, 200, 400]
        assert await counted(session, running) == (2, 2)
    async with cluster(ClusterConfig()) as running, ClientSession() as session:
        status, answer = await load(session, running, "x", "a.gguf")
        assert status == 400
        assert "adapters may not be loaded here: the shard runs without --lora-dir" in answer
        assert await counted(session, running) == (0, 0)
