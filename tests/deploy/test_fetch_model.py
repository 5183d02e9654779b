"""The init container's download of a model, from a server that breaks off."""

import hashlib
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from deploy.chart import CHART

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
    return subprocess.run([sys.executable, SCRIPT, url, sha256, path], capture_output=True, text=True, timeout=60)


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
    assert list(tmp_path.iterdir()) == []


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
