"""`caravan batch` and a server that loses connections."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from caravan_serve.batch.remote import RemoteBatches
from caravan_serve.servers import Server


class LossyServer(ThreadingHTTPServer):
    """Begins batches. The connection of the first one is closed without a reply."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.batches: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: LossyServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.batches.append({"id": f"batch_{len(self.server.batches)}", "metadata": body["metadata"]})
        if len(self.server.batches) > 1:
            self._reply(self.server.batches[-1])

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        found = [one for one in self.server.batches if one["id"] == name]
        self._reply(found[0] if found else {"data": self.server.batches, "has_more": False})

    def _reply(self, body: object) -> None:
        data = json.dumps(body).encode()
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


def test_a_batch_whose_reply_was_lost_is_not_begun_twice(server: LossyServer) -> None:
    remote = RemoteBatches(Server(f"http://127.0.0.1:{server.server_port}"))
    try:
        assert remote.begin("file_1", "/v1/completions", "one") == "batch_0"
        assert len(server.batches) == 1
        assert remote.begin("file_1", "/v1/completions", "another") == "batch_1"
    finally:
        remote.close()
