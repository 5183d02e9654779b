"""A stand-in for Kubernetes' API server, as far as EndpointSlices go: lists in pages, watches, tokens, and failures."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

from caravan_router.kubernetes import ServiceAccount

NAMESPACE, SERVICE = "ml", "caravan-demo-cpu"
_PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def pod(address: str, *, ready: bool | None = True, terminating: bool | None = None) -> dict[str, Any]:
    """Return an endpoint as the API server shows it."""
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    return {"addresses": [address], "conditions": conditions, "nodeName": "node-1", "targetRef": {"kind": "Pod"}}


class EndpointApi:
    """The slices of one Service. Every change has a version, and is told to all watches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.token = ""
        # Watches from an older version get 410.
        self.oldest = 0
        # The status of all answers; 200 if they are as asked.
        self.status = 200
        # What a list returns instead of slices, if it is not empty.
        self.body = ""
        self.page = 500
        self.lists = 0
        # What was told, with its version: a watch begins with what it has missed.
        self._history: list[tuple[int, dict[str, Any]]] = []
        self.watches: list[asyncio.Queue[dict[str, Any] | None]] = []
        self.watched_from: list[int] = []
        self.url = ""

    @property
    def account(self) -> ServiceAccount:
        return ServiceAccount(self.url, self._folder)

    async def rotate_token(self, token: str) -> None:
        self.token = token
        await asyncio.to_thread((self._folder / "token").write_text, f"{token}\n")

    async def delete_token(self) -> None:
        await asyncio.to_thread((self._folder / "token").unlink)

    def put(self, name: str, *pods: dict[str, Any]) -> None:
        """Make or change a slice."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        metadata = {"name": name, "namespace": NAMESPACE, "resourceVersion": str(self.version), "labels": {}}
        self.slices[name] = {"addressType": "IPv4", "metadata": metadata, "endpoints": list(pods) or None, "ports": []}
        self._tell(kind, self.slices[name])

    def delete(self, name: str) -> None:
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", gone)

    def bookmark(self) -> None:
        self.version += 1
        self._tell("BOOKMARK", {"kind": "EndpointSlice", "metadata": {"resourceVersion": str(self.version)}})

    def fail_watches(self, code: int) -> None:
        """Let all watches end with an error, as happens when the server forgets what they have not read."""
        self._tell("ERROR", {"kind": "Status", "code": code, "message": "too old resource version"})

    def end_watches(self) -> None:
        """Let all watches end, as they do after a time."""
        for queue in self.watches:
            queue.put_nowait(None)

    def _tell(self, kind: str, found: dict[str, Any]) -> None:
        # As it is now: it may change before it is sent.
        event = json.loads(json.dumps({"type": kind, "object": found}))
        if kind != "ERROR":
            self._history.append((self.version, event))
        for queue in self.watches:
            queue.put_nowait(event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401, "message": "Unauthorized"}, status=401)
        if self.status != 200:
            return web.json_response({"kind": "Status", "code": self.status, "message": "no"}, status=self.status)
        assert request.query["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
        return await self._watch(request) if request.query.get("watch") else self._list(request)

    def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        if self.body:
            return web.Response(text=self.body)
        start = int(request.query.get("continue", "0"))
        page = min(self.page, int(request.query["limit"]))
        names = sorted(self.slices)
        metadata = {"resourceVersion": str(self.version)}
        if start + page < len(names):
            metadata["continue"] = str(start + page)
        items = [self.slices[name] for name in names[start : start + page]]
        return web.json_response({"kind": "EndpointSliceList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        self.watched_from.append(version)
        if version < self.oldest:
            return web.json_response({"kind": "Status", "code": 410, "message": "Expired"}, status=410)
        assert request.query["allowWatchBookmarks"] == "true"
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        for told, event in self._history:
            if told > version:
                queue.put_nowait(event)
        self.watches.append(queue)
        try:
            while (next_event := await queue.get()) is not None:
                line = json.dumps(next_event).encode() + b"\n"
                # In two parts, which the reader has to put together.
                await response.write(line[: len(line) // 2])
                await response.write(line[len(line) // 2 :])
        finally:
            self.watches.remove(queue)
        return response


def _make_certificates(folder: Path) -> ssl.SSLContext:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    return tls


@contextlib.asynccontextmanager
async def endpoint_api(folder: Path) -> AsyncIterator[EndpointApi]:
    """Serve over TLS, with an authority in the account's folder, until the end of the block."""
    tls = await asyncio.to_thread(_make_certificates, folder)
    api = EndpointApi(folder)
    await api.rotate_token("first")
    app = web.Application()
    app.router.add_get(_PATH, api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    api.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        api.end_watches()
        await runner.cleanup()
