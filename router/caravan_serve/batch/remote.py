"""The routes for files and batches of a server."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2

from caravan.client.connection import DIRECT
from caravan_serve.servers import Server, ServerError

T = TypeVar("T")

_TIMEOUT_S = 60.0
# A server that restarts is away for so long at most.
_AWAY_S, _RETRY_S = 60.0, 0.5
# The longest that a server gives a batch.
_WINDOW = "168h"
# Has the server answer a request that is sent again with what the first one made.
_KEY = "Idempotency-Key"
_CHUNK_BYTES = 1 << 18
_PASSING = frozenset({429, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Progress:
    """A batch as its server describes it. ``errors``: why it was refused, a sentence for each line."""

    status: str
    total: int
    completed: int
    failed: int
    output_file: str | None
    error_file: str | None
    errors: tuple[str, ...] = ()

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.status in {"completed", "failed", "expired", "cancelled"}


class RemoteBatches:
    """Reaches a server again and again while it restarts. All calls raise ServerError."""

    def __init__(self, server: Server) -> None:
        self._url = server.url
        headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
        self._http = httpx2.Client(base_url=server.url, headers=headers, mounts=DIRECT, timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def upload(self, path: Path, key: str) -> str:
        """Return the id of ``path`` as a file there, which is the same one for the same ``key``."""

        def send() -> httpx2.Response:
            with path.open("rb") as file:
                form, files = {"purpose": "batch"}, {"file": (path.name, file)}
                return self._http.post("/v1/files", data=form, files=files, headers={_KEY: key}, timeout=None)

        return str(self._asked(send)["id"])

    def begin(self, file_id: str, endpoint: str, key: str) -> str:
        """Return the id of a batch, which is the same one for the same ``key``."""
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": _WINDOW}
        return str(self._asked(lambda: self._http.post("/v1/batches", json=body, headers={_KEY: key}))["id"])

    def progress(self, batch_id: str) -> Progress:
        """Return how far a batch is."""
        found = self._asked(lambda: self._http.get(f"/v1/batches/{batch_id}"))
        counts, errors = found["request_counts"], (found["errors"] or {}).get("data", ())
        return Progress(
            status=found["status"],
            total=counts["total"],
            completed=counts["completed"],
            failed=counts["failed"],
            output_file=found["output_file_id"],
            error_file=found["error_file_id"],
            errors=tuple(f"line {one['line']}: {one['message']}" for one in errors),
        )

    def download(self, file_id: str, path: Path) -> None:
        """Write the content of a file to ``path``."""

        def receive() -> httpx2.Response:
            with self._http.stream("GET", f"/v1/files/{file_id}/content") as reply, path.open("wb") as file:
                if reply.is_error:
                    reply.read()
                    return reply
                for chunk in reply.iter_bytes(_CHUNK_BYTES):
                    file.write(chunk)
                return reply

        self._sent(receive)

    def delete(self, file_id: str) -> None:
        """Delete a file, if it is there."""
        with self._named_errors():
            self._http.delete(f"/v1/files/{file_id}")

    def _asked(self, send: Callable[[], httpx2.Response]) -> Any:
        with self._named_errors():
            return self._sent(send).json()

    def _sent(self, send: Callable[[], httpx2.Response]) -> httpx2.Response:
        until_s = None  # An upload may take longer than that before it fails.
        while True:
            try:
                reply = send()
            except httpx2.TransportError as error:
                if until_s is not None and time.monotonic() >= until_s:
                    raise ServerError(f"no server answers at {self._url}: {error}") from None
            else:
                if reply.status_code not in _PASSING or (until_s is not None and time.monotonic() >= until_s):
                    return self._checked(reply)
            until_s = until_s or time.monotonic() + _AWAY_S
            time.sleep(_RETRY_S)

    def _checked(self, reply: httpx2.Response) -> httpx2.Response:
        if not reply.is_error:
            return reply
        try:
            message = str(reply.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"it answered with status {reply.status_code}"
        raise ServerError(f"{self._url}: {message}")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx2.HTTPError, ValueError) as error:
            raise ServerError(f"{self._url} is no Caravan server: {error}") from None
