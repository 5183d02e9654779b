"""Hands requests over to another router while this one holds no shard of their model, or a borrowed one."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import ClientConnectionError, ClientResponse, ClientSession, ClientTimeout, web
from multidict import CIMultiDict

from caravan_dialects.api.body import decode
from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError, UnknownModelError
from caravan_dialects.api.generation.context import MODEL_HEADER, model_name
from caravan_router.http.server.body import read_bytes, read_json
from caravan_router.http.server.event_stream import STREAM_BEGUN
from caravan_router.http.server.form import FORM
from caravan_router.http.server.route import Handler
from caravan_router.http.server.state import STATE

_log = logging.getLogger(__name__)

# A request that has it is not handed over again: the other router may have lost its shard meanwhile. Its value says
# whether the model is an adapter that was loaded while shards ran, which the other router may not have: there its name
# may mean nothing, or the model without an adapter. So that one answers 421 unless it has such an adapter.
_HANDED_OVER = "X-Caravan-Handed-Over"
_OF_MODEL, _OF_ADAPTER = "1", "adapter"
_MISDIRECTED = 421
# Each router keeps its own responses and conversations, loads its own adapters, and knows its own shards.
_OWN = ("/v1/responses", "/v1/conversations", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin")
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


@dataclass(frozen=True, slots=True)
class _Neighbour:
    """The router at ``url``, which answers for ``model``; ``header``: the value of `_HANDED_OVER`."""

    model: str
    url: str
    header: str


class HandingOver:
    """Owns the connections to other routers."""

    def __init__(self) -> None:
        self._client: ClientSession | None = None
        self._decoder = msgspec.json.Decoder(_Named)

    @web.middleware
    async def hand_over(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer with what another router answers, if the request is for that one now and it can."""
        if request.headers.get(_HANDED_OVER) == _OF_ADAPTER and not await self._has_adapter(request):
            return web.Response(status=_MISDIRECTED)
        found = await self._neighbour(request)
        if found is None:
            return await handler(request)
        try:
            answering = await self._send(request, found)
        except (ClientConnectionError, TimeoutError) as error:
            _log.warning("a request could not be handed over and waits", extra={"url": found.url, "reason": str(error)})
            return await handler(request)
        async with answering:
            if answering.status != _MISDIRECTED:
                request.app[STATE].metrics.of(found.model).handed_over()
                return await _return(request, answering)
        _log.debug("a request waits: the other router does not have its adapter", extra={"url": found.url})
        return await handler(request)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def _has_adapter(self, request: web.Request) -> bool:
        """Whether the model that ``request`` names is an adapter here. Raises RequestError."""
        asked = await self._asked(request)
        return any(asked in engine.model.adapters for engine in request.app[STATE].fleet.engines)

    async def _asked(self, request: web.Request) -> str:
        """Return the name of the model in the body or else in the header, "" if there is none. Raises RequestError."""
        named = decode(await read_json(request, any_type=True), self._decoder)
        return named.model or request.headers.get(MODEL_HEADER) or ""

    async def _neighbour(self, request: web.Request) -> _Neighbour | None:
        """Return the router that should answer ``request``; None if it is this one."""
        fleet = request.app[STATE].fleet
        if request.method != "POST" or _HANDED_OVER in request.headers or request.path.startswith(_OWN):
            return None
        # The model of a form is known when all of it has been read.
        if request.content_type == FORM:
            return None
        if not fleet.hands_over:
            return None
        try:
            asked = await self._asked(request)
        except (MalformedBodyError, BodyMismatchError):
            return None
        try:
            names = [model_name(fleet, asked)]
        except UnknownModelError:
            # Another router may have loaded an adapter of this name.
            names = [engine.model.name for engine in fleet.engines]
        for name in names:
            if (url := fleet.neighbour(name)) is not None and (engine := fleet.engine(name)) is not None:
                is_adapter = asked in engine.model.loaded_adapters
                return _Neighbour(engine.model.name, url, _OF_ADAPTER if is_adapter else _OF_MODEL)
        return None

    async def _send(self, request: web.Request, neighbour: _Neighbour) -> ClientResponse:
        if self._client is None:
            self._client = ClientSession(
                auto_decompress=False, timeout=ClientTimeout(total=None, sock_connect=_CONNECT_S)
            )
        headers = _without(request.headers, _NOT_SENT)
        headers[_HANDED_OVER] = neighbour.header
        return await self._client.post(
            f"{neighbour.url.rstrip('/')}{request.rel_url.raw_path_qs}", data=await read_bytes(request), headers=headers
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
