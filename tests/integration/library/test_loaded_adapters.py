"""Adapters that a program loads while its model is open. What the toy model computes depends on their keys."""

import asyncio
import hashlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from caravan import LLM, AsyncLLM, ClosedError, Executor, RequestError, SamplingParams
from caravan_proto.messages.adapters import AdapterSource, adapter_key
from caravan_shard.backends.toy.model import ToyVocabulary
from caravan_testing.toy_oracle import expected_output
from caravan_testing.waiting import DEADLINE_S, wait_until

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_PROMPT = "a prompt in common, which every adapter continues in its own way " * 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(f"weights of {name}".encode())
    (tmp_path / "damaged.gguf").write_bytes(b"damaged")
    return tmp_path


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", ctx_size=1024, cache_ram=16, lora=["start=s.gguf"], max_loras=2) as opened:
        yield opened


def _expected(name: str, file: Path, scale: float = 1.0) -> list[int]:
    """The tokens that follow the prompt with an adapter that is loaded from ``file``."""
    source = AdapterSource(name=name, path=file.name, scale=scale)
    key = adapter_key(source, hashlib.sha256(file.read_bytes()).hexdigest())
    return _continued(key)


def _continued(key: str = "") -> list[int]:
    prompt = ToyVocabulary().tokenize(_PROMPT, add_special=True, parse_special=True)
    return expected_output(prompt, 12, ignore_eos=True, adapter=key)


def _answered(llm: LLM, adapter: str = "") -> list[int]:
    return [*llm.generate(_PROMPT, _GREEDY, adapter=adapter)[0].outputs[0].token_ids]


def test_calls_name_what_was_loaded(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(RequestError, match="the toy model cannot use"):
        llm.load_adapter("poet", "damaged.gguf")
    llm.load_adapter("poet", "a.gguf")
    llm.load_adapter("half", folder / "a.gguf", scale=0.5)
    assert llm.list_adapters() == ["start", "poet", "half"]
    # Twice: first computed, then from saved cells.
    for _ in range(2):
        assert _answered(llm) == _continued()
        assert _answered(llm, "start") == _continued("start")
        assert _answered(llm, "poet") == _expected("poet", folder / "a.gguf")
        assert _answered(llm, "half") == _expected("half", folder / "a.gguf", 0.5)
    session = llm.chat_session(adapter="poet")
    text = session.respond("Hi", _GREEDY).text
    assert text == llm.chat(session.messages[:1], _GREEDY, adapter="poet")[0].outputs[0].text

    llm.unload_adapter("half")
    llm.load_adapter("poet", folder / "b.gguf", replace=True)
    assert llm.list_adapters() == ["start", "poet"]
    assert _answered(llm, "poet") == _expected("poet", folder / "b.gguf")
    with pytest.raises(RequestError, match="there is no adapter 'half'"):
        _answered(llm, "half")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.load_adapter("x", "missing.gguf"),
            "path cannot be read: No such file or directory. Given: '/",
        ),
        (lambda llm: llm.load_adapter("x", "/missing/lora_path"), "directory. Given: '/missing/lora_path'"),
        (lambda llm: llm.load_adapter("x", "."), "path must be a file. Given: '/"),
        (lambda llm: llm.load_adapter("a b", "a.gguf"), "name must have 1 to 128 characters"),
        (lambda llm: llm.load_adapter("toy.gguf", "a.gguf"), "name must not be the name of another model or adapter"),
        (lambda llm: llm.load_adapter("start", "a.gguf"), "name must not be the name of another model or adapter"),
        (lambda llm: llm.load_adapter("a", "b.gguf"), "name must not be that of a loaded adapter, unless replace=True"),
        (lambda llm: llm.load_adapter("c", "a.gguf"), "max_loras allows 2 adapters at a time, and as many are loaded"),
        (lambda llm: llm.load_adapter("x", "a.gguf", scale=1e9), "scale must be from -1000 to 1000. Given: 1e+09"),
        (lambda llm: llm.load_adapter(5, "a.gguf"), "name must be a str. Given: 5"),
        (lambda llm: llm.load_adapter("x", 5), "path must be a str or a Path. Given: 5"),
        (lambda llm: llm.load_adapter("x", "a.gguf", scale="1"), "scale must be a number. Given: '1'"),
        (lambda llm: llm.unload_adapter("start"), "no adapter that `load_adapter` has loaded has this name"),
        (lambda llm: llm.unload_adapter(["a"]), "name must be a str. Given: ['a']"),
    ],
)
def test_what_cannot_be_loaded_is_named(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], None], message: str
) -> None:
    monkeypatch.chdir(folder)
    llm.load_adapter("a", "a.gguf")
    llm.load_adapter("b", "b.gguf")
    with pytest.raises(RequestError) as refused:
        call(llm)
    assert message in str(refused.value)
    assert llm.list_adapters() == ["start", "a", "b"]


def test_a_running_generation_ends_with_its_adapter(folder: Path) -> None:
    with LLM("toy.gguf", backend="fake", ctx_size=20_000, fake_step_ms=2.0, max_loras=1) as slow:
        slow.load_adapter("a", folder / "a.gguf")
        parts = slow.stream(_PROMPT, SamplingParams(temperature=0, max_tokens=9000, ignore_eos=True), adapter="a")
        tokens = [*next(parts).outputs[0].token_ids]
        slow.unload_adapter("a")
        assert slow.list_adapters() == []
        with pytest.raises(RequestError, match="max_loras allows 1 adapters"):
            slow.load_adapter("b", folder / "b.gguf")
        while len(tokens) < 12:
            tokens += next(parts).outputs[0].token_ids
        assert tokens[:12] == _expected("a", folder / "a.gguf")
        parts.close()  # type: ignore[attr-defined]
        wait_until(lambda: _loads(slow, folder / "b.gguf"), "its place is free")


def _loads(llm: LLM, file: Path) -> bool:
    try:
        llm.load_adapter("b", file)
    except RequestError:
        return False
    return True


async def test_awaited_calls_load_and_unload(folder: Path) -> None:
    async with AsyncLLM("toy.gguf", backend="fake") as llm:
        await asyncio.gather(*(llm.load_adapter(name, folder / f"{name}.gguf") for name in ("a", "b")))
        assert sorted(await llm.list_adapters()) == ["a", "b"]
        (output,) = await llm.generate(_PROMPT, _GREEDY, adapter="b")
        assert [*output.outputs[0].token_ids] == _expected("b", folder / "b.gguf")
        await llm.unload_adapter("b")
        assert await llm.list_adapters() == ["a"]
    with pytest.raises(ClosedError):
        await llm.list_adapters()


def _asked(url: str, path: str, body: object = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def test_clients_of_a_server_may_load_from_its_folder_alone(folder: Path) -> None:
    (folder / "shared").mkdir()
    (folder / "shared/c.gguf").write_bytes(b"weights of c")
    with LLM("toy.gguf", backend="fake", lora_dir=str(folder / "shared")) as llm, llm.serve(port=0) as server:
        llm.load_adapter("a", folder / "a.gguf")
        status, told = _asked(
            server.url, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(folder / "a.gguf")}
        )
        assert (status, "in the folder of --lora-dir" in told) == (400, True)
        assert _asked(server.url, "/v1/load_lora_adapter", {"lora_name": "c", "lora_path": "c.gguf"})[0] == 200
        assert llm.list_adapters() == ["a", "c"]
        assert _answered(llm, "c") == _expected("c", folder / "shared/c.gguf")
        sent = {"model": "a", "prompt": _PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = json.loads(_asked(server.url, "/v1/completions", sent)[1])
        assert answer["model"] == "a"
        info = json.loads(_asked(server.url, "/info")[1])
        assert (info["max_loras"], info["loaded_loras"]) == (8, 2)


def test_an_executor_loads_none() -> None:
    with pytest.raises(TypeError, match="no engine with the options: lora_dir, max_loras"):
        Executor("toy.gguf", backend="fake", lora_dir="x", max_loras=2)
