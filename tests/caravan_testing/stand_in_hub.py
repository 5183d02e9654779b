"""A hub that huggingface_hub takes for one, on this machine: its API, its redirects to storage, and faults on demand.

The hub answers on one port and its storage on another, as a CDN does, so that a token that leaks would be seen there.
"""

import contextlib
import hashlib
import json
import random
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "5a" * 20
TOKEN = "hf_standin"
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Content:
    """The bytes of a file. ``lfs``: it is in storage under its SHA-256, as all but small files are."""

    data: bytes
    lfs: bool = True

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def git_sha1(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.stored) + self.stored).hexdigest()

    @property
    def stored(self) -> bytes:
        """What Git has: the file, or a pointer to storage."""
        return self.pointer if self.lfs else self.data

    @property
    def pointer(self) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        return text.encode()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_sha1


@dataclass
class Repository:
    """A repository at one commit. ``gated``: files go only to whom `Faults.admits` lets in."""

    files: dict[str, Content]
    gated: bool = False
    private: bool = False


@dataclass
class Faults:
    """What goes wrong. Numbers in lists are used up, one at each request for a file's bytes."""

    api_statuses: list[int] = field(default_factory=list)
    api_headers: dict[str, str] = field(default_factory=dict)
    """Of every reply of the API, whatever its status."""
    api_body: bytes | None = None
    """Sent with status 200 in place of every reply of the API."""
    api_redirects: bool = False
    """Each request to the API is sent to the same place again."""
    storage_statuses: list[int] = field(default_factory=list)
    cut_after: list[int] = field(default_factory=list)
    """Bytes after which a transfer ends early."""
    stall_after: list[int] = field(default_factory=list)
    """Bytes after which a transfer sends nothing more, until `StandInHub.release_stalled`."""
    damaged_transfers: int = 0
    """How many transfers have a wrong last byte."""
    ignores_ranges: bool = False
    wrong_ranges: bool = False
    lies_about_size: int = 0
    """Added to the size in listings."""
    names_no_digest: bool = False
    bytes_per_s: float = 0.0
    """0: as fast as it goes."""
    hides: frozenset[str] = frozenset()
    """Paths that are listed and not there."""
    admits: bool = False
    """Whether the token may read what is gated."""


@dataclass(frozen=True)
class Seen:
    """A request that came."""

    method: str
    path: str
    headers: Mapping[str, str]
    of_storage: bool

    @property
    def is_transfer(self) -> bool:
        """Whether it asked for the bytes of a file."""
        return self.of_storage and self.method == "GET"


class StandInHub:
    """The state of a hub: its repositories and its faults, which may be changed while it runs."""

    def __init__(self) -> None:
        self.url = ""
        self.storage_url = ""
        self._lock = threading.Lock()
        self._stalled = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the address. What is stalled ends."""
        self.release_stalled()
        self.repositories: dict[str, Repository] = {}
        self.faults = Faults()
        self.seen: list[Seen] = []
        self.reached: list[tuple[int, int]] = []
        """Of each transfer that has ended: its first byte, and the one after the last that went out."""
        self.commit = COMMIT

    def add(
        self, name: str, files: Mapping[str, bytes | Content], *, gated: bool = False, private: bool = False
    ) -> None:
        """Add a repository; files that are bytes are in storage."""
        contents = {path: one if isinstance(one, Content) else Content(one) for path, one in files.items()}
        self.repositories[name] = Repository(contents, gated, private)

    def note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def release_stalled(self) -> None:
        """Close the connections that send nothing more by now."""
        self._stalled.set()
        self._stalled = threading.Event()

    def stall(self) -> None:
        """Return when `release_stalled` was called, or the hub ends."""
        self._stalled.wait()

    def next_of(self, faults: list[int]) -> int | None:
        """Take the first of these numbers away and return it."""
        with self._lock:
            return faults.pop(0) if faults else None

    def takes_damage(self) -> bool:
        with self._lock:
            damaged = self.faults.damaged_transfers > 0
            self.faults.damaged_transfers -= damaged
            return damaged

    @property
    def transfers(self) -> list[Seen]:
        """The requests for the bytes of files so far."""
        return [seen for seen in self.seen if seen.is_transfer]

    def content(self, sha256: str) -> Content | None:
        for repository in self.repositories.values():
            for content in repository.files.values():
                if content.lfs and content.sha256 == sha256:
                    return content
        return None


@contextlib.contextmanager
def stand_in_hub() -> Iterator[StandInHub]:
    """Run a hub on free ports until the block ends."""
    hub = StandInHub()
    with _running(lambda *args: _HubHandler(hub, *args)) as port, _running(lambda *args: _Storage(hub, *args)) as other:
        hub.url, hub.storage_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{other}"
        try:
            yield hub
        finally:
            hub.release_stalled()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave: they are killed here."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextlib.contextmanager
def _running(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[int]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    of_storage = False

    def __init__(self, hub: StandInHub, *args: object) -> None:
        self.hub = hub
        super().__init__(*args)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: `Seen` tells what came."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.note(Seen(self.command, self.path, headers, self.of_storage))
        with contextlib.suppress(ConnectionError):
            self.answer(unquote(urlsplit(self.path).path), headers)

    def answer(self, path: str, headers: Mapping[str, str]) -> None:
        raise NotImplementedError

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        self.reply(status, body, headers | ({"X-Error-Code": code} if code else {}))


class _HubHandler(_Handler):
    def answer(self, path: str, headers: Mapping[str, str]) -> None:
        token = headers.get("authorization", "").removeprefix("Bearer ")
        if token and token != TOKEN:
            return self.fail(401, "", "Invalid credentials in Authorization header")
        if path.startswith("/api/models/"):
            return self._api(path.removeprefix("/api/models/"), token)
        for verb in ("resolve", "raw"):
            repository, found, rest = path[1:].partition(f"/{verb}/")
            if found:
                revision, _, file = rest.partition("/")
                return self._file(repository, revision, file, token, raw=verb == "raw")
        return self.fail(404, "", "Not found")

    def _visible(self, name: str, token: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not token):
            # As the real one: who is unknown learns nothing.
            self.fail(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _api(self, rest: str, token: str) -> None:
        faults = self.hub.faults
        if faults.api_redirects:
            return self.reply(302, headers={"Location": self.path})
        if (status := self.hub.next_of(faults.api_statuses)) is not None:
            return self.reply(status, b"{}", faults.api_headers)
        if faults.api_body is not None:
            return self.reply(200, faults.api_body, {"Content-Type": "text/html"})
        name, _, revision = rest.partition("/revision/")
        repository = self._visible(name, token)
        if repository is None:
            return None
        if (revision or "main") not in {"main", "v1", self.hub.commit}:
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [self._sibling(path, content) for path, content in repository.files.items()]
        body = {
            "_id": "0", "id": name, "modelId": name, "sha": self.hub.commit, "private": repository.private,
            "gated": "manual" if repository.gated else False, "tags": ["gguf"], "siblings": siblings,
        }  # fmt: skip
        return self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _sibling(self, path: str, content: Content) -> dict[str, object]:
        faults = self.hub.faults
        size = len(content.data) + faults.lies_about_size
        row: dict[str, object] = {"rfilename": path, "size": size}
        if not faults.names_no_digest:
            row["blobId"] = content.git_sha1
            if content.lfs:
                row["lfs"] = {"sha256": content.sha256, "size": size, "pointerSize": len(content.pointer)}
        return row

    def _file(self, name: str, revision: str, path: str, token: str, *, raw: bool) -> None:
        repository = self._visible(name, token)
        if repository is None:
            return None
        if repository.gated and not (token and self.hub.faults.admits):
            return self.fail(403 if token else 401, "GatedRepo", "Access to this model is restricted")
        if revision not in {"main", "v1", self.hub.commit}:
            return self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = repository.files.get(path)
        if content is None or path in self.hub.faults.hides:
            return self.fail(404, "EntryNotFound", "Entry not found")
        if raw:
            return self.reply(200, content.stored)
        headers = {"X-Repo-Commit": self.hub.commit, "Accept-Ranges": "bytes"}
        if not content.lfs:
            return self.reply(200, content.data, headers | {"ETag": f'"{content.etag}"'})
        headers |= {"X-Linked-Size": str(len(content.data)), "X-Linked-Etag": f'"{content.etag}"'}
        location = f"{self.hub.storage_url}/{content.sha256}?signature=once"
        return self.reply(302, headers=headers | {"Location": location})


class _Storage(_Handler):
    of_storage = True

    def answer(self, path: str, headers: Mapping[str, str]) -> None:
        content = self.hub.content(path[1:])
        if content is None:
            return self.reply(404)
        faults = self.hub.faults
        if (status := self.hub.next_of(faults.storage_statuses)) is not None:
            return self.reply(status)
        data, start, end = content.data, 0, len(content.data)
        asked = headers.get("range", "")
        if asked and not faults.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1 if last else end)
            if start >= len(data):
                return self.reply(416, headers={"Content-Range": f"bytes */{len(data)}"})
            self.send_response(206)
            shown = start + 1 if faults.wrong_ranges else start
            self.send_header("Content-Range", f"bytes {shown}-{end - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{content.etag}"')
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return None
        body = bytearray(data[start:end])
        if self.hub.takes_damage():
            body[-1] ^= 1
        return self._send(memoryview(body), start)

    def _send(self, body: memoryview, start: int) -> None:
        faults = self.hub.faults
        cut, stall = self.hub.next_of(faults.cut_after), self.hub.next_of(faults.stall_after)
        sent = 0
        stop = min(len(body), *(one for one in (cut, stall, len(body)) if one is not None))
        try:
            while sent < stop:
                part = body[sent : min(stop, sent + _CHUNK)]
                self.wfile.write(part)
                sent += len(part)
                if faults.bytes_per_s:
                    time.sleep(len(part) / faults.bytes_per_s)
        finally:
            self.hub.reached.append((start, start + sent))
        if stop < len(body):
            self.wfile.flush()
            if stall is not None:
                self.hub.stall()
            self.close_connection = True


def small_gguf(size: int = 4096, *, architecture: str = "llama", seed: int = 0) -> bytes:
    """Return a file of ``size`` bytes: a header that names the architecture, and bytes that differ by ``seed``."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    header += _text("general.architecture") + struct.pack("<I", 8) + _text(architecture)
    header += _text(f"{architecture}.context_length") + struct.pack("<II", 4, 2048)
    header += _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b")
    assert len(header) <= size, "the header has no room"
    return header + random.Random(seed).randbytes(size - len(header))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
