"""The init container's download of models: from a server that breaks off, and from a hub with tokens and redirects."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme
import yaml
from deploy.chart import CHART, pod_of

from caravan_testing.waiting import DEADLINE_S

SCRIPT = CHART / "files/fetch_model.py"
CONTENT = bytes(range(256)) * 8192
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """Serves CONTENT. ``cut_offs``: replies that end early; ``ranges``: what was asked for."""

    url: str = ""
    cut_offs: int = 0
    ranges: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            state.ranges.append(asked)
            start = 0 if asked is None else int(asked.removeprefix("bytes=").removesuffix("-"))
            if self.path == "/missing":
                return self.send_error(404)
            if start >= len(CONTENT):
                return self.send_error(416)
            body = CONTENT[start:]
            self.send_response(200 if asked is None else 206)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cut_offs:
                state.cut_offs -= 1
                body = body[: len(body) // 2]
            self.wfile.write(body)
            return None

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        state.url = f"http://127.0.0.1:{listening.server_port}"
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield state
        listening.shutdown()


def fetch(url: str, path: Path, sha256: str = SHA256) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, url, sha256, path], capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_file_is_fetched_once_and_read_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert fetch(server.url, path).returncode == 0
    assert path.read_bytes() == CONTENT
    again = fetch(server.url, path)
    assert (again.returncode, again.stdout) == (0, f"{path} is there\n")
    assert len(server.ranges) == 1


def test_a_download_that_was_cut_off_continues(server: Server, tmp_path: Path) -> None:
    server.cut_offs = 1
    path = tmp_path / "model.gguf"
    assert fetch(server.url, path).returncode == 0
    assert path.read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_run_that_was_killed_after_the_last_byte_checks_what_it_has(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    (tmp_path / "model.gguf.partial").write_bytes(CONTENT)
    assert fetch(server.url, path).returncode == 0
    assert path.read_bytes() == CONTENT


def test_a_file_with_another_sum_is_removed(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    refused = fetch(server.url, path, "0" * 64)
    assert refused.returncode == 1
    assert f"the file has the SHA-256 {SHA256}, not {'0' * 64}" in refused.stderr
    assert [left.name for left in tmp_path.iterdir()] == [".fetch_model.lock"]


def test_a_file_that_was_changed_is_checked_again(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    fetch(server.url, path)
    path.write_bytes(b"GGUF, but another one")
    assert fetch(server.url, path).returncode == 1
    assert fetch(server.url, path).returncode == 0
    assert path.read_bytes() == CONTENT


def test_a_file_that_the_server_lacks_is_an_error_at_once(server: Server, tmp_path: Path) -> None:
    refused = fetch(f"{server.url}/missing", tmp_path / "model.gguf")
    assert refused.returncode == 1
    assert "404" in refused.stderr
    assert len(server.ranges) == 1


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
            self.send_response(200)
            self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT)
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
    command = [sys.executable, SCRIPT, *words]
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
    ("variable", "message"), [("DOWNLOAD_TOKEN", "HTTP Error 401"), ("SSL_CERT_FILE", "CERTIFICATE_VERIFY_FAILED")]
)
def test_without_token_or_authority_the_download_fails(
    hub: Hub, tmp_path: Path, variable: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    refused = run_container(hub, tmp_path / "models", without=variable)
    assert refused.returncode == 1
    assert message in refused.stderr
    # Of several files, it says which one.
    assert refused.stderr.startswith("fetch_model: https://")


def test_shards_that_share_a_folder_download_each_file_once(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with ThreadPoolExecutor() as shards:
        runs = list(shards.map(lambda _: fetch(server.url, path), range(4)))
    assert [run.returncode for run in runs] == [0] * 4
    assert len(server.ranges) == 1
