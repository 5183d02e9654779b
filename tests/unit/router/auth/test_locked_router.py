"""The router program reads its key file at the start and on SIGHUP."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from aiohttp import ClientSession

from caravan_dialects.auth.key import digest_of
from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_testing.waiting import eventually, in_time


def entry_of(secret: str) -> str:
    return f'[[keys]]\nname = "{secret}"\nsha256 = "{digest_of(secret).hex()}"\n'


async def test_sighup_reloads_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    await asyncio.to_thread(path.write_text, entry_of("a"))
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), api_keys_file=str(path))
    stop, listening = asyncio.Event(), asyncio.Queue[str]()
    router = asyncio.create_task(run_router(config, stop, lambda _engine, url: listening.put_nowait(url)))
    async with in_time("the router listens, and reads its keys again"), ClientSession(await listening.get()) as client:

        async def status(secret: str) -> int:
            async with client.get("/v1/models", headers={"Authorization": f"Bearer {secret}"}) as response:
                return response.status

        # No shard is up, which only a client with a valid key learns.
        assert (await status("a"), await status("b")) == (503, 401)
        await asyncio.to_thread(path.write_text, entry_of("b"))
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: status("b"), "the key b is valid", lambda found: found == 503)
        assert await status("a") == 401
    stop.set()
    await router
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_router_does_not_start_with_an_invalid_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("[[keys]]\nname = 'a'\n")
    command = [sys.executable, "-m", "caravan_serve", "router", "--shard", "127.0.0.1:1", "--port", "0"]
    done = subprocess.run([*command, "--api-keys-file", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: --api-keys-file: {path}: Object missing required field `sha256`" in done.stderr
