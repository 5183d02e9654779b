"""The init container's download of models, from a hub with a token, redirects, a proxy and an authority of its own."""

import hashlib
import http.server
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme
import yaml
from deploy.chart import CHART, pod_of

from caravan_testing.waiting import DEADLINE_S

CONTENT = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Hub:
    """A hub over HTTPS that demands a token, and storage to which it redirects."""

    url: str = ""
    storage: str = ""
    authority: Path = Path()
    proxy: str = ""
    # The addresses for which the proxy was asked.
    proxied: list[str] = field(default_factory=list)
    # The paths that were asked for, each with the token.
    asked: list[tuple[str, str | None]] = field(default_factory=list)


TOKEN = "hub-token"


def _hub_handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            token = self.headers["Authorization"]
            hub.asked.append((self.path, token))
            # Storage refuses a token that it does not know, as signed URLs do.
            if (token is not None) if self.path.startswith("/stored/") else (token != f"Bearer {TOKEN}"):
                return self.send_error(401)
            if "/resolve/" in self.path:
                return self._redirect(f"/resolved/{self.path.rpartition('/')[2]}")
            if self.path.startswith("/resolved/"):
                return self._redirect(f"{hub.storage}/stored/{self.path.rpartition('/')[2]}")
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            body = CONTENT[int(first) : int(last) + 1]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return None

        def _redirect(self, location: str) -> None:
            self.send_response(307)
            self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def _proxy_handler(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            hub.proxied.append(self.path)
            host, _, port = self.path.partition(":")
            # A client that trusts no certificate resets its connection.
            with suppress(ConnectionResetError), socket.create_connection((host, int(port))) as server:
                self.send_response(200)
                self.end_headers()
                ends = {self.connection: server, server: self.connection}
                while True:
                    for end in select.select(list(ends), [], [])[0]:
                        if not (data := end.recv(1 << 16)):
                            return
                        ends[end].sendall(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def _served(handler: type[http.server.BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Serve until the block ends, and yield the port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.daemon_threads = True
        if context is not None:
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_port
        listening.shutdown()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    found = Hub(authority=tmp_path / "company-ca.pem")
    authority.cert_pem.write_to_path(str(found.authority))
    with (
        _served(_hub_handler(found), context) as hub_port,
        _served(_hub_handler(found), context) as storage_port,
        _served(_proxy_handler(found)) as proxy_port,
    ):
        found.url, found.storage = f"https://localhost:{hub_port}", f"https://localhost:{storage_port}"
        found.proxy = f"http://127.0.0.1:{proxy_port}"
        yield found


def run_container(hub: Hub, folder: Path, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the init container of the value set, with this hub and folder, its variables but ``without``."""
    (container,) = pod_of("gated-download", "caravan-llama-gpu")["initContainers"]
    replaced: Mapping[str, str] = {
        "https://hub.example.com": hub.url,
        "/models": str(folder),
        "/etc/caravan/download-ca/ca.crt": str(hub.authority),
        "http://proxy.example.com:3128": hub.proxy,
    }
    words = []
    for word in container["args"]:
        for old, new in replaced.items():
            word = word.replace(old, new)
        words.append(SHA256 if len(word) == len(SHA256) and word.isalnum() else word)
    variables = {entry["name"]: entry.get("value", TOKEN) for entry in container["env"]}
    variables = {name: replaced.get(value, value) for name, value in variables.items() if name != without}
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    assert container["command"] == ["caravan", "pull"]
    command = [sys.executable, "-m", "caravan_serve", "pull", *words]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=DEADLINE_S)


def test_parts_and_adapter_come_from_a_hub_with_token_proxy_and_authority(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    done = run_container(hub, folder)
    assert done.returncode == 0, done.stderr
    values = yaml.safe_load((CHART / "ci/gated-download.yaml").read_text())["models"]["llama"]
    files = {path.name for path in (folder / "llama").iterdir() if path.suffix == ".gguf"}
    assert values["file"] in files
    assert files == {
        "Llama-3.3-70B-Instruct-Q4_K_M-00001-of-00002.gguf",
        "Llama-3.3-70B-Instruct-Q4_K_M-00002-of-00002.gguf",
        "poet.gguf",
    }
    assert {address.partition(":")[0] for address in hub.proxied} == {"localhost"}
    # The token goes along within the hub, and not to its storage.
    assert {token for path, token in hub.asked if path.startswith("/stored/")} == {None}


@pytest.mark.parametrize(
    ("variable", "message"),
    [("DOWNLOAD_TOKEN", "answers with status 401"), ("SSL_CERT_FILE", "is not trusted; set SSL_CERT_FILE")],
)
def test_without_token_or_authority_the_download_fails(
    hub: Hub, tmp_path: Path, variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    refused = run_container(hub, tmp_path / "models", without=variable)
    assert refused.returncode == 1
    assert message in refused.stderr
    # Of several files, it says which one.
    assert "-00001-of-00002.gguf" in refused.stderr
