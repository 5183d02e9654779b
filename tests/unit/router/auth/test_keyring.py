"""The keys of a router, reloaded when their file changes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from caravan_dialects.auth.key import ApiKey, digest_of
from caravan_router.auth.key_file import KeyFileError
from caravan_router.auth.keyring import Keyring, KeyWatch
from caravan_scheduler.core.generation import Tenant
from caravan_testing.waiting import eventually

A = ApiKey(digest=digest_of("a"), tenant=Tenant(name="a"), requests_per_minute=1, concurrent_requests=2)


B = ApiKey(digest=digest_of("b"), tenant=Tenant(name="b"))


def test_a_client_is_found_by_its_key_and_by_nothing_else() -> None:
    keyring = Keyring([A, B], 0.0)
    for secret, key in (("a", A), ("b", B)):
        client = keyring.find(secret)
        assert client is not None
        assert client.key is key
    assert keyring.find("") is None
    assert keyring.find(A.digest.hex()) is None
    assert keyring.find("\udcff") is None


def test_a_key_without_limits_is_not_limited() -> None:
    client = Keyring([B], 0.0).find("b")
    assert client is not None
    assert not any(client.take_request(0.0) for _ in range(1000))
    assert client.permits.can_take(10**9)


def test_used_up_allowance_survives_a_reload() -> None:
    keyring = Keyring([A], 0.0)
    client = keyring.find("a")
    assert client is not None
    assert client.take_request(0.0) == 0.0
    with client.permits.take(2):
        # The same name gets a new key and a lower limit.
        keyring.replace([replace(A, digest=digest_of("new"), concurrent_requests=1), B], 0.0)
        assert keyring.find("a") is None
        assert keyring.find("new") is client
        assert client.take_request(0.0) > 0
        assert client.permits.free == -1
        assert not client.permits.can_take(1)
    assert client.permits.can_take(1)


def test_a_reload_adds_and_removes_limits() -> None:
    keyring = Keyring([B], 0.0)
    client = keyring.find("b")
    assert client is not None
    keyring.replace([replace(B, requests_per_minute=1)], 0.0)
    assert [client.take_request(0.0) > 0 for _ in range(2)] == [False, True]
    keyring.replace([B], 0.0)
    assert client.take_request(0.0) == 0.0


def test_a_removed_key_is_not_found() -> None:
    keyring = Keyring([A, B], 0.0)
    keyring.replace([A], 0.0)
    assert keyring.find("b") is None


def text_of(*secrets: str) -> str:
    return "".join(f'[[keys]]\nname = "{secret}"\nsha256 = "{digest_of(secret).hex()}"\n' for secret in secrets)


async def write(path: Path, text: str) -> None:
    """Write a new file and move it into place, as editors do."""

    def replace() -> None:
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        os.replace(fresh, path)

    await asyncio.to_thread(replace)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text_of("a"))
    return path


@contextlib.asynccontextmanager
async def watching(path: Path, check_s: float) -> AsyncIterator[KeyWatch]:
    watch = await asyncio.to_thread(KeyWatch, path, check_s)
    task = asyncio.create_task(watch.run())
    yield watch
    task.cancel()
    await asyncio.wait({task})


@pytest.mark.parametrize("content", [None, "", b"\xff"])
def test_an_invalid_file_at_the_start_is_an_error_that_names_it(path: Path, content: str | bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(KeyFileError, match=r"keys\.toml: "):
        KeyWatch(path)


async def test_a_changed_file_is_read_again(path: Path) -> None:
    async with watching(path, check_s=0.01) as watch:
        await write(path, text_of("a", "b"))
        await eventually(lambda: watch.keyring.find("b") is not None)


async def test_reload_reads_the_file_at_once(path: Path) -> None:
    async with watching(path, check_s=1000) as watch:
        await write(path, text_of("b"))
        watch.file.reload()
        await eventually(lambda: watch.keyring.find("b") is not None)
        assert watch.keyring.find("a") is None
        await write(path, text_of("c"))
        watch.file.reload()
        await eventually(lambda: watch.keyring.find("c") is not None)


async def test_an_invalid_file_keeps_the_old_keys_and_is_logged_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching(path, check_s=0.005) as watch:
        with caplog.at_level(logging.ERROR):
            await write(path, "[[keys]]\n")
            await eventually(lambda: bool(caplog.records))
            await asyncio.sleep(0.05)
            [record] = caplog.records
            assert "keeping the old ones" in record.getMessage()
            assert watch.keyring.find("a") is not None
            await asyncio.to_thread(path.unlink)
            await eventually(lambda: len(caplog.records) == 2)
        await write(path, text_of("b"))
        await eventually(lambda: watch.keyring.find("b") is not None)
