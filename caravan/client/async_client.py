"""A client with calls that are awaited."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack
from urllib.parse import quote

import httpx2

from caravan.calls import Calls
from caravan.client import bodies
from caravan.client.async_served_conversation import CONVERSATIONS, AsyncServedConversation
from caravan.client.connection import Call, Connection
from caravan.client.outputs import ConversationExport, Item
from caravan.client.remote_model import RemoteModel
from caravan.model import Model
from caravan.options import check_names

_PARALLEL = 32


class ClientOptions(TypedDict, total=False):
    """Options of a client.

    ``api_key``: sent with every request. ``model``: the name of a model or of an adapter for calls that name none.
    ``parallel``: most prompts of one call that are on the server at a time, 32 by default. ``retries``: how often a
    call is sent again that the server refused with 409, 429 or 503 and a Retry-After, after as many seconds; 0 by
    default. Nothing of such a call was computed. A call whose connection broke is never repeated. ``http``: the HTTP
    client to use, for proxies, certificates and limits; it is closed with this one.
    """

    api_key: str
    model: str
    parallel: int
    retries: int
    http: httpx2.AsyncClient


class AsyncClient(Calls):
    """`Client` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    Cancelling a call closes its connection, which ends its generations on the server.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """``url``: that of the server. Connects with the first call. Raises ValueError, and TypeError for options."""
        check_names(options, ClientOptions)
        key = options.get("api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        parallel, retries = options.get("parallel", _PARALLEL), options.get("retries", 0)
        if parallel < 1 or retries < 0:
            raise ValueError(f"parallel must be >= 1 and retries >= 0. Given: {parallel} and {retries}")
        self._connection = Connection(url, headers, retries, options.get("http"))
        self._remote = RemoteModel(self._connection, options.get("model", ""), parallel)

    async def close(self) -> None:
        """Close all connections. Closing it again does nothing."""
        await self._connection.close()

    def _model(self) -> Model:
        return self._remote

    async def create_conversation(
        self, items: Sequence[Item] = (), *, metadata: Mapping[str, str] | None = None
    ) -> AsyncServedConversation:
        """Make a conversation, with items in OpenAI's form; a message is ``{"role": ..., "content": ...}``."""
        body = {"items": list(items), "metadata": None if metadata is None else dict(metadata)}
        return await self._conversation("POST", CONVERSATIONS, body)

    async def import_conversation(
        self, export: ConversationExport, *, metadata: Mapping[str, str] | None = None
    ) -> AsyncServedConversation:
        """Make a conversation of an export, from this or another server. ``metadata``: by default the export's."""
        return await self._conversation("POST", CONVERSATIONS, bodies.imported(export, metadata))

    async def conversation(self, conversation_id: str) -> AsyncServedConversation:
        """Return a conversation that exists. Raises NotFoundError."""
        return await self._conversation("GET", f"{CONVERSATIONS}/{quote(conversation_id, safe='')}", None)

    async def _conversation(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncServedConversation:
        call = Call(method=method, path=path, body=body)
        return await AsyncServedConversation.at(self._connection, self._remote.name, call)
