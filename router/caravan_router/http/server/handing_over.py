"""Hands requests over to another router while this one holds no shard of their model, or a borrowed one."""

import logging
from collections.abc import Mapping

import msgspec
from aiohttp import ClientConnectionError, ClientResponse, ClientSession, ClientTimeout, web
from multidict import CIMultiDict

from caravan_dialects.api.body import decode
from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError
from caravan_router.http.server.body import read_bytes, read_json
from caravan_router.http.server.event_stream import STREAM_BEGUN
from caravan_router.http.server.form import FORM
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import STATE

_log = logging.getLogger(__name__)

# A request that has it is not handed over again: the other router may have lost its shard meanwhile.
_HANDED_OVER = "X-Caravan-Handed-Over"
# Each router keeps its own responses and conversations, and knows its own shards.
_OWN = ("/v1/responses", "/v1/conversations", "/admin")
# Headers of one connection or one server. The body is sent decompressed, and this router adds those for pages.
_NOT_SENT = frozenset(
    {"host", "connection", "keep-alive", "content-length", "transfer-encoding", "content-encoding", "expect", "origin"}
)
_NOT_RETURNED = frozenset(
    {"connection", "keep-alive", "content-length", "transfer-encoding", "date", "server", "x-request-id"}
)
_CONNECT_S = 2.0


class _Named(msgspec.Struct):
    model: str | None = None


class HandingOver:
    """Owns the connections to other routers."""

    def __init__(self) -> None:
        self._client: ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Named)

    @web.middleware
    async def hand_over(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer with what another router answers, if the request is for that one now."""
        found = await self._neighbour(request)
        if found is None:
            return await handler(request)
        model, url = found
        try:
            answering = await self._send(request, url)
        except (ClientConnectionError, TimeoutError) as error:
            _log.warning("a request could not be handed over and waits", extra={"url": url, "reason": str(error)})
            return await handler(request)
        request.app[STATE].metrics.of(model).handed_over()
        async with answering:
            return await _return(request, answering)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def _neighbour(self, request: web.Request) -> tuple[str, str] | None:
        """Return the model and the URL of the router that should answer ``request``; None if it is this one."""
        fleet = request.app[STATE].fleet
        if request.method != "POST" or _HANDED_OVER in request.headers or request.path.startswith(_OWN):
            return None
        # The model of a form is known when all of it has been read.
        if request.content_type == FORM:
            return None
        if not fleet.hands_over:
            return None
        try:
            named = decode(await read_json(request, any_type=True), self._decoder)
        except (MalformedBodyError, BodyMismatchError):
            return None
        for name in (named.model or "",) if fleet.names.strict else (named.model or "", ""):
            if (url := fleet.neighbour(name)) is not None and (engine := fleet.engine(name)) is not None:
                return engine.model.name, url
        return None

    async def _send(self, request: web.Request, url: str) -> ClientResponse:
        if self._client is None:
            self._client = ClientSession(
                auto_decompress=False, timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S)
            )
        headers = _without(request.headers, _NOT_SENT)
        headers[_HANDED_OVER] = "1"
        return await self._client.post(
            f"{url.rstrip('/')}{request.rel_url.raw_path_qs}", data=await read_bytes(request), headers=headers
        )


async def _return(request: web.Request, answering: ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answering.status, headers=_without(answering.headers, _NOT_RETURNED))
    await response.prepare(request)
    request[STREAM_BEGUN] = True
    async for data in answering.content.iter_any():
        await response.write(data)
    await response.write_eof()
    return response


def _without(headers: Mapping[str, str], names: frozenset[str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in names)
