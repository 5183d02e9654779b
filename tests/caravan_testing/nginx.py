"""nginx in front of servers, with the configuration that Caravan publishes."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from caravan_testing.programs import configuration, kept_ports
from caravan_testing.serve_process import ROOT
from caravan_testing.waiting import eventually

SITE = ROOT / "deploy/nginx/caravan.conf"


def _write_configuration(folder: Path, upstreams: Sequence[str], port: int) -> None:
    site = SITE.read_text()
    assert site.count("server 127.0.0.1:3000;") == site.count("listen 80;") == 1
    servers = " ".join(f"server {one};" for one in upstreams)
    site = site.replace("server 127.0.0.1:3000;", servers).replace("listen 80;", f"listen 127.0.0.1:{port};")
    (folder / "site.conf").write_text(site)
    (folder / "main.conf").write_text(configuration(folder, f"include {folder}/site.conf;"))


@asynccontextmanager
async def nginx(folder: Path, *upstreams: str) -> AsyncIterator[str]:
    """Run nginx in front of ``upstreams``, each a host and port, and yield its URL."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    assert program, "no nginx: apt-get install nginx-light"
    with kept_ports(1) as (port,):
        async with _nginx_on(program, folder, upstreams, port) as url:
            yield url


@asynccontextmanager
async def _nginx_on(program: str, folder: Path, upstreams: Sequence[str], port: int) -> AsyncIterator[str]:
    await asyncio.to_thread(_write_configuration, folder, upstreams, port)
    process = await asyncio.create_subprocess_exec(
        program, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(folder / "main.conf")
    )
    try:
        _, writer = await eventually(
            lambda: asyncio.open_connection("127.0.0.1", port),
            "nginx listens",
            ignoring=(ConnectionRefusedError,),
            unless=lambda: process.returncode is not None and (folder / "error.log").read_text(),
        )
        writer.close()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()
