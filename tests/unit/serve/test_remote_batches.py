"""`caravan batch` and a server that loses connections."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from caravan_serve.batch.remote import RemoteBatches
from caravan_serve.servers import Server


class LossyServer(ThreadingHTTPServer):
    """Makes a file or batch for each key. The connection of the first request is closed without a reply."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.made: dict[tuple[str, str], str] = {}


class _Handler(BaseHTTPRequestHandler):
    server: LossyServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        made, asked = self.server.made, (self.path, self.headers["Idempotency-Key"])
        is_first = not made
        made.setdefault(asked, f"{self.path.rpartition('/')[2]}_{len(made)}")
        if not is_first:
            data = json.dumps({"id": made[asked]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[LossyServer]:
    with LossyServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("kind", ["files", "batches"])
def test_what_was_made_before_its_reply_was_lost_is_not_made_twice(
    server: LossyServer, kind: str, tmp_path: Path
) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_text("{}")
    remote = RemoteBatches(Server(f"http://127.0.0.1:{server.server_port}"))

    def make(key: str) -> str:
        return remote.upload(requests, key) if kind == "files" else remote.begin("file_1", "/v1/completions", key)

    try:
        assert make("one") == f"{kind}_0"
        assert len(server.made) == 1
        assert make("another") == f"{kind}_1"
    finally:
        remote.close()
