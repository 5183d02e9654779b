"""A client with calls that are awaited, and its conversations."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypedDict, Unpack
from urllib.parse import quote

import httpx2

from caravan.calls import Calls, Model
from caravan.client import bodies
from caravan.client.bodies import Input, RespondOptions
from caravan.client.connection import Call, Connection
from caravan.client.outputs import ConversationExport, Item, Operation, Response, ResponsePart
from caravan.client.reading import ResponseReader, read_response
from caravan.client.remote_model import RemoteModel
from caravan.options import check_names
from caravan.prompts import CHAT_PARAMS, params_or
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.openai.conversations.schema import ConversationObject, DeletedConversation, Export
from caravan_dialects.api.openai.responses.schema import ItemList, ResponseObject

CONVERSATIONS = "/v1/conversations"
_RESPONSES = "/v1/responses"
_PAGE_ITEMS = 100
_PARALLEL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncServedConversation:
    """A conversation on a server, as it was when the server answered. Every change returns it anew.

    ``head`` names the place where it ends. A change with ``if_match=conversation.head`` raises HeadMovedError, and
    changes nothing, if the conversation is no longer there. A response moves the head, too: see `refresh`.
    ``created_at``: Unix time in seconds.

    Changes and responses raise ConversationBusyError while a response is under way. Every call raises NotFoundError if
    the server has no such conversation.
    """

    id: str
    head: str
    metadata: Mapping[str, str]
    created_at: int
    _connection: Connection = field(repr=False, compare=False)
    _model: str = field(repr=False, compare=False)

    @classmethod
    async def at(cls, connection: Connection, model: str, call: Call) -> Self:
        """Return the conversation that ``call`` is answered with. ``model``: for responses whose options name none."""
        reply = (await connection.ask(call)).read(ConversationObject)
        return cls(
            id=reply.id,
            head=reply.head,
            metadata=reply.metadata,
            created_at=reply.created_at,
            _connection=connection,
            _model=model,
        )

    async def refresh(self) -> Self:
        """Return the conversation as it is now."""
        return await self._anew(Call(method="GET", path=self._path()))

    async def respond(
        self, given: Input, sampling_params: SamplingParams | None = None, **options: Unpack[RespondOptions]
    ) -> Response:
        """Answer ``given``, a text or OpenAI's items, and add both to the conversation.

        Without ``sampling_params``, an answer may have as many tokens as fit. Raises RequestError for parameters that
        responses do not have, such as ``n`` and ``stop``.
        """
        answer = await self._connection.ask(self._response_call(given, sampling_params, options, stream=False))
        return read_response(answer.read(ResponseObject), answer.request_id)

    async def stream(
        self, given: Input, sampling_params: SamplingParams | None = None, **options: Unpack[RespondOptions]
    ) -> AsyncGenerator[ResponsePart, None]:
        """Yield the parts of what `respond` returns as they come. Closing the generator ends the response, which the
        conversation then does not get.
        """
        call = self._response_call(given, sampling_params, options, stream=True)
        async for part in self._connection.stream(call, ResponseReader):
            yield part

    def _response_call(
        self, given: Input, params: SamplingParams | None, options: RespondOptions, *, stream: bool
    ) -> Call:
        body = bodies.response(self.id, given, params_or(params, CHAT_PARAMS), options, stream=stream)
        if self._model:
            body.setdefault("model", self._model)
        return Call(method="POST", path=_RESPONSES, body=body)

    async def fork(self, at: str | None = None, *, metadata: Mapping[str, str] | None = None) -> Self:
        """Return a new conversation with all items, or those up to ``at``.

        ``at``: the id of an item or of a response; a response under way counts as far as it has come. ``metadata``: by
        default that of this conversation. No text is copied or computed.
        """
        body = {"at": at, "metadata": None if metadata is None else dict(metadata)}
        return await self._anew(Call(method="POST", path=self._path("fork"), body=body))

    async def rewind(self, *, to: str | None = None, turns: int | None = None, if_match: str | None = None) -> Self:
        """Make the item ``to`` the last one, or take back the last ``turns``; a turn begins with the user's message."""
        return await self._changed("rewind", {"to": to, "turns": turns}, if_match)

    async def shift(self, drop: int, *, keep: int = 0, if_match: str | None = None) -> Self:
        """Keep the system messages at the start and ``keep`` items after them, and drop the next ``drop`` items."""
        return await self._changed("shift", {"keep": keep, "drop": drop}, if_match)

    async def edit(self, operations: Sequence[Operation], *, if_match: str | None = None) -> Self:
        """Insert, replace and delete items, one operation after another: all of them, or none."""
        return await self._changed("edit", bodies.edit(operations), if_match)

    async def update(self, metadata: Mapping[str, str], *, if_match: str | None = None) -> Self:
        """Replace the metadata: at most 16 texts by name."""
        return await self._changed("", {"metadata": dict(metadata)}, if_match)

    async def items(self) -> list[Item]:
        """Return all items, the oldest first, in OpenAI's form."""
        found: list[Item] = []
        query = {"order": "asc", "limit": str(_PAGE_ITEMS)}
        while True:
            call = Call(method="GET", path=self._path("items"), query=query)
            page = (await self._connection.ask(call)).read(ItemList)
            found += page.data
            if not page.has_more or page.last_id is None:
                return found
            query = query | {"after": page.last_id}

    async def add_items(self, items: Sequence[Item], *, if_match: str | None = None) -> list[Item]:
        """Add items to the end, and return them with their ids. Nothing is generated."""
        call = Call(method="POST", path=self._path("items"), body={"items": list(items)}, if_match=if_match)
        return list((await self._connection.ask(call)).read(ItemList).data)

    async def item(self, item_id: str) -> Item:
        """Return one item."""
        call = Call(method="GET", path=self._path("items", item_id))
        return (await self._connection.ask(call)).read(dict[str, Any])

    async def delete_item(self, item_id: str, *, if_match: str | None = None) -> Self:
        """Delete one item."""
        call = Call(method="DELETE", path=self._path("items", item_id), if_match=if_match)
        return await self._anew(call)

    async def export(self) -> ConversationExport:
        """Return the whole conversation, for `Client.import_conversation` of this or another server."""
        reply = (await self._connection.ask(Call(method="GET", path=self._path("export")))).read(Export)
        tokens = reply.tokens
        return ConversationExport(
            items=reply.items,
            metadata=reply.metadata,
            fingerprint="" if tokens is None else tokens.fingerprint,
            token_ids=() if tokens is None else tokens.token_ids,
        )

    async def delete(self, *, if_match: str | None = None) -> None:
        """Forget the conversation. Its responses stay."""
        call = Call(method="DELETE", path=self._path(), if_match=if_match)
        (await self._connection.ask(call)).read(DeletedConversation)

    async def _anew(self, call: Call) -> Self:
        return await self.at(self._connection, self._model, call)

    async def _changed(self, change: str, body: Mapping[str, Any], if_match: str | None) -> Self:
        path = self._path(change) if change else self._path()
        return await self._anew(Call(method="POST", path=path, body=body, if_match=if_match))

    def _path(self, *names: str) -> str:
        return "/".join([CONVERSATIONS, *(quote(name, safe="") for name in (self.id, *names))])


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
        check_names(options, ClientOptions.__annotations__)
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
