"""HTTPS: serving with a certificate, reloading it, and requiring client certificates."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientError, ClientSession, TCPConnector

from caravan_dialects.api.limits import Limits
from caravan_proto.tls import TlsFiles
from caravan_router.app import run_router
from caravan_router.config import RouterConfig
from caravan_router.http.app import build_app
from caravan_router.http.server.listener import Listen, listening
from caravan_router.http.server.tls import Tls
from caravan_router.metrics.recorder import Metrics
from caravan_testing.http_server import events
from caravan_testing.scripted_engine import ScriptedEngine
from caravan_testing.waiting import eventually, in_time


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def write_certificate(authority: trustme.CA, folder: Path) -> tuple[str, str]:
    certificate = authority.issue_cert("127.0.0.1")
    chain, key = folder / "chain.pem", folder / "key.pem"
    chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    return str(chain), str(key)


@asynccontextmanager
async def router(config: RouterConfig) -> AsyncIterator[str]:
    """Run the router as the program does, with a shard that cannot be reached; yield its URL."""
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    running = asyncio.create_task(run_router(config, stop, lambda _engine, url: urls.put_nowait(url)))
    try:
        async with in_time("the router listens"):
            url = await urls.get()
        yield url
    finally:
        stop.set()
        await running


async def serial_of(url: str, context: ssl.SSLContext) -> str:
    """Return the serial number of the server's certificate."""
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return str(certificate["serialNumber"])


async def test_a_stream_over_https(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    tls = await asyncio.to_thread(Tls, TlsFiles(prefix="--ssl-", certfile=chain, keyfile=key))
    limits = Limits()
    async with (
        listening(build_app(ScriptedEngine(), limits, Metrics()), limits, Listen(tls=tls.context)) as port,
        ClientSession(connector=TCPConnector(ssl=trusting(authority))) as client,
    ):
        url = port.url
        assert url.startswith("https://127.0.0.1:")
        body = {"inputs": "a", "parameters": {"max_new_tokens": 3}}
        async with client.post(f"{url}/generate_stream", json=body) as response:
            assert [event["token"]["text"] for event in events(await response.text())] == [" w1", " w2", " w3"]


async def test_sighup_reloads_the_certificate_and_a_broken_one_changes_nothing(
    authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key)
    trust = trusting(authority)
    async with router(config) as url:
        first = await serial_of(url, trust)
        await asyncio.to_thread(Path(key).write_bytes, b"no key")
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: "certificate not reloaded" in caplog.text, "the broken certificate is logged")
        assert await serial_of(url, trust) == first
        await asyncio.to_thread(write_certificate, authority, tmp_path)
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: serial_of(url, trust), "another certificate", lambda serial: serial != first)


async def test_a_renewed_certificate_is_served_without_a_signal(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key)
    trust = trusting(authority)
    async with router(config) as url:
        first = await serial_of(url, trust)
        await asyncio.to_thread(write_certificate, authority, tmp_path)
        await eventually(lambda: serial_of(url, trust), "another certificate", lambda serial: serial != first)


async def test_ssl_ca_certs_requires_client_certificates(authority: trustme.CA, tmp_path: Path) -> None:
    chain, key = await asyncio.to_thread(write_certificate, authority, tmp_path)
    named = tmp_path / "authorities.pem"
    await asyncio.to_thread(authority.cert_pem.write_to_path, named)
    config = RouterConfig(port=0, shard=("127.0.0.1:1",), ssl_certfile=chain, ssl_keyfile=key, ssl_ca_certs=str(named))
    known, unknown = trusting(authority), trusting(authority)
    await asyncio.to_thread(authority.issue_cert("a-client").configure_cert, known)
    async with router(config) as url, ClientSession(url) as client:
        async with client.get("/health", ssl=known) as response:
            assert response.status == 503
        with pytest.raises(ClientError):
            await client.get("/health", ssl=unknown)


def test_a_missing_certificate_is_a_startup_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caravan_serve", "router", "--shard", "127.0.0.1:1", "--port", "0"]
    missing = tmp_path / "none.pem"
    done = subprocess.run([*command, "--ssl-certfile", missing], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"error: --ssl-certfile: {missing}: [Errno 2]" in done.stderr
    done = subprocess.run([*command, "--ssl-keyfile", missing], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile" in done.stderr
