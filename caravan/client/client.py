"""A client with calls that block."""

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from caravan.client.async_client import AsyncClient, ClientOptions
from caravan.client.async_served_conversation import AsyncServedConversation
from caravan.client.client_thread import ClientThread
from caravan.client.outputs import ConversationExport, Item
from caravan.client.served_conversation import ServedConversation
from caravan.llm import Messages, chat_options, progress, split_conversations
from caravan.outputs import RequestOutput
from caravan.prompts import Prompt, Prompts, plain_prompts
from caravan.sampling_params import SamplingParams


class Client:
    """A client of a Caravan server. Use it as a context manager, or `close` it; else it ends with the program.

    Its calls have the parameters and outputs of `caravan.LLM`, so that a program moves from a model of its own to a
    server by one line. It is for what Caravan adds to other servers: ``priority``, ``timeout``, ``choice_parameters``
    and conversations. For everything else use OpenAI's client.

    Any thread may call. An exception in a call, Ctrl-C among them, closes the connections of that call, which ends its
    generations on the server. Every call raises ApiError if the server answers with an error, ServerConnectionError if
    the connection fails, BadReplyError if another server answers, and ClosedError if the client is closed. A request
    that breaks a rule is a RequestError, a ``timeout`` that passed a DeadlineError, as they are in `caravan.LLM`.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """``url``: that of the server. Connects with the first call. Raises ValueError, and TypeError for options."""
        self._client = AsyncClient(url, **options)
        self._thread = ClientThread(self._client.close)

    def close(self) -> None:
        """End the calls that run, and close all connections. Closing it again does nothing."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue all prompts; return one entry for each, in their order. See `caravan.LLM.generate`.

        If one of several prompts fails, those that run are ended.
        """
        with progress(len(plain_prompts(prompts)), shown=use_tqdm) as on_output:
            return self._thread.run(self._client.generate_each(prompts, sampling_params, adapter, on_output))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> Iterator[RequestOutput]:
        """Yield the parts of the outputs of one prompt as they come, each with one entry in ``outputs``.

        ``num_cached_tokens`` is known in the last part, and 0 before. Closing the iterator ends the generation.
        """
        return self._thread.iterate(self._client.stream(prompt, sampling_params, adapter=adapter))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several; return one entry for each. See `caravan.LLM.chat`.

        The server keeps nothing of it: see `create_conversation` for conversations that it keeps.
        """
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        with progress(len(split_conversations(messages)), shown=use_tqdm) as on_output:
            return self._thread.run(self._client.chat_each(messages, sampling_params, options, adapter, on_output))

    def stream_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        schema: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> Iterator[RequestOutput]:
        """Yield the parts of the answers to one conversation as they come; tool calls are in the last part of each."""
        return self._thread.iterate(
            self._client.stream_chat(
                messages,
                sampling_params,
                tools=tools,
                tool_choice=tool_choice,
                schema=schema,
                chat_template_kwargs=chat_template_kwargs,
                adapter=adapter,
            )
        )

    def create_conversation(
        self, items: Sequence[Item] = (), *, metadata: Mapping[str, str] | None = None
    ) -> ServedConversation:
        """Make a conversation, with items in OpenAI's form; a message is ``{"role": ..., "content": ...}``."""
        return self._served(self._client.create_conversation(items, metadata=metadata))

    def import_conversation(
        self, export: ConversationExport, *, metadata: Mapping[str, str] | None = None
    ) -> ServedConversation:
        """Make a conversation of an export, from this or another server. ``metadata``: by default the export's."""
        return self._served(self._client.import_conversation(export, metadata=metadata))

    def conversation(self, conversation_id: str) -> ServedConversation:
        """Return a conversation that exists. Raises NotFoundError."""
        return self._served(self._client.conversation(conversation_id))

    def _served(self, call: Coroutine[Any, Any, AsyncServedConversation]) -> ServedConversation:
        return ServedConversation(self._thread, self._thread.run(call))
