import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from caravan_dialects.auth.key import digest_of
from caravan_router.auth.key_file import KeyFileError
from caravan_router.auth.key_watch import KeyWatch
from caravan_testing.waiting import eventually


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
