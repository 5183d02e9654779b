"""A client with calls that are awaited."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpx2

from caravan.client import bodies
from caravan.client.async_served_conversation import CONVERSATIONS, AsyncServedConversation
from caravan.client.connection import Call, Connection
from caravan.client.outputs import ConversationExport, Item
from caravan.client.reading import ChatChunks, OutputReader, read_chat, read_completion, read_completion_chunk
from caravan.llm import CHAT_PARAMS, Messages, chat_options, for_each, split_conversations
from caravan.outputs import RequestOutput
from caravan.prompts import Prompt, Prompts, plain_prompts
from caravan.sampling_params import SamplingParams

_T = TypeVar("_T")

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
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


class AsyncClient:
    """`Client` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    Cancelling a call closes its connection, which ends its generations on the server.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """``url``: that of the server. Connects with the first call. Raises ValueError, and TypeError for options."""
        if unknown := sorted(options.keys() - ClientOptions.__annotations__.keys()):
            raise TypeError(f"unknown options: {', '.join(unknown)}")
        key = options.get("api_key")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._model = options.get("model", "")
        self._parallel, retries = options.get("parallel", _PARALLEL), options.get("retries", 0)
        if self._parallel < 1 or retries < 0:
            raise ValueError(f"parallel must be >= 1 and retries >= 0. Given: {self._parallel} and {retries}")
        self._connection = Connection(url, headers, retries, options.get("http"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Closing it again does nothing."""
        await self._connection.close()

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """See `Client.generate`."""
        return await self.generate_each(prompts, sampling_params, adapter, _ignore)

    async def generate_each(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str,
        on_output: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        """Do what `generate` does, and pass each output to ``on_output`` when it is there."""
        plain = plain_prompts(prompts)
        params = for_each(sampling_params or SamplingParams(), len(plain))
        model = adapter or self._model
        calls = [
            Call(method="POST", path=_COMPLETIONS, body=bodies.completion(prompt, own, model, stream=False))
            for prompt, own in zip(plain, params, strict=True)
        ]

        async def output(number: int) -> RequestOutput:
            made = read_completion(plain[number], await self._connection.ask(calls[number]))
            on_output(made)
            return made

        return await self._together(output, len(calls))

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `Client.stream`."""
        (plain,) = plain_prompts(prompt)
        params = sampling_params or SamplingParams()
        body = bodies.completion(plain, params, adapter or self._model, stream=True)

        def reader(request_id: str) -> OutputReader:
            return OutputReader(request_id, plain, body.get("n", 1), read_completion_chunk)

        async for part in self._connection.stream(Call(method="POST", path=_COMPLETIONS, body=body), reader):
            yield part

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """See `Client.chat`."""
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        return await self.chat_each(messages, sampling_params, options, adapter, _ignore)

    async def chat_each(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        adapter: str,
        on_output: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        """Do what `chat` does, and pass each output to ``on_output`` when it is there."""
        conversations = split_conversations(messages)
        params = for_each(sampling_params or CHAT_PARAMS, len(conversations))
        model = adapter or self._model
        calls = [
            Call(method="POST", path=_CHAT, body=bodies.chat(conversation, own, options, model, stream=False))
            for conversation, own in zip(conversations, params, strict=True)
        ]

        async def output(number: int) -> RequestOutput:
            made = read_chat(await self._connection.ask(calls[number]))
            on_output(made)
            return made

        return await self._together(output, len(calls))

    async def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `Client.stream_chat`."""
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        body = bodies.chat(messages, sampling_params or CHAT_PARAMS, options, adapter or self._model, stream=True)

        def reader(request_id: str) -> OutputReader:
            return OutputReader(request_id, None, body.get("n", 1), ChatChunks())

        async for part in self._connection.stream(Call(method="POST", path=_CHAT, body=body), reader):
            yield part

    async def create_conversation(
        self, items: Sequence[Item] = (), *, metadata: Mapping[str, str] | None = None
    ) -> AsyncServedConversation:
        """See `Client.create_conversation`."""
        body = {"items": list(items), "metadata": None if metadata is None else dict(metadata)}
        return await self._conversation("POST", CONVERSATIONS, body)

    async def import_conversation(
        self, export: ConversationExport, *, metadata: Mapping[str, str] | None = None
    ) -> AsyncServedConversation:
        """See `Client.import_conversation`."""
        return await self._conversation("POST", CONVERSATIONS, bodies.imported(export, metadata))

    async def conversation(self, conversation_id: str) -> AsyncServedConversation:
        """See `Client.conversation`."""
        return await self._conversation("GET", f"{CONVERSATIONS}/{quote(conversation_id, safe='')}", None)

    async def _conversation(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncServedConversation:
        call = Call(method=method, path=path, body=body)
        return await AsyncServedConversation.at(self._connection, self._model, call)

    async def _together(self, work: Callable[[int], Coroutine[Any, Any, _T]], count: int) -> list[_T]:
        """Do the work of all numbers below ``count``. The first error cancels the rest, and is raised."""
        turns = asyncio.Semaphore(self._parallel)

        async def one(number: int) -> _T:
            async with turns:
                try:
                    return await work(number)
                except Exception as error:
                    if count > 1:
                        error.add_note(f"at entry {number} of {count}")
                    raise

        tasks = [asyncio.ensure_future(one(number)) for number in range(count)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _ignore(_output: RequestOutput) -> None:
    """Take an output that nobody counts."""
