"""A client with calls that block, and its conversations."""

import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from caravan.background import BackgroundLoop
from caravan.calls import BlockingCalls
from caravan.client.async_client import AsyncClient, AsyncServedConversation, ClientOptions
from caravan.twins import Twin, blocking, iterated, returning

_T = TypeVar("_T")
_A = TypeVar("_A")
_P = ParamSpec("_P")


class ClientThread:
    """Runs the calls of a client, and of its conversations, until it is closed or the last of them is gone."""

    def __init__(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """``close`` runs last."""
        self._loop = loop = BackgroundLoop("client")
        # Also at the end of the program.
        self._close = weakref.finalize(self, loop.close, close)

    def close(self) -> None:
        """End the calls that run, and the thread. Closing it again does nothing."""
        self._close()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` to its end and return its result. An interrupt cancels it first. Raises ClosedError."""
        return self._loop.run(work)

    def iterate(self, items: AsyncGenerator[_T, None]) -> Iterator[_T]:
        """Yield the items; closing the iterator closes ``items``. Raises ClosedError."""
        yield from self._loop.iterate(items)


def served(
    method: Callable[Concatenate[_A, _P], Coroutine[Any, Any, AsyncServedConversation]],
) -> Callable[Concatenate[Twin[_A], _P], "ServedConversation"]:
    """Make a call that blocks and returns a conversation of a method that is awaited."""
    run = blocking(method)

    @wraps(method)
    def call(self: Twin[_A], /, *args: _P.args, **kwargs: _P.kwargs) -> "ServedConversation":
        return ServedConversation(run(self, *args, **kwargs), self._loop)

    return returning("ServedConversation", call)


class ServedConversation(Twin[AsyncServedConversation]):
    """`AsyncServedConversation` with calls that block: the same calls with the same meaning."""

    def __repr__(self) -> str:
        return repr(self._awaited).removeprefix("Async")

    @property
    def id(self) -> str:
        """Its name on the server."""
        return self._awaited.id

    @property
    def head(self) -> str:
        """The place where it ended when the server answered, for ``if_match``."""
        return self._awaited.head

    @property
    def metadata(self) -> Mapping[str, str]:
        """Texts by name, which the server keeps with it."""
        return self._awaited.metadata

    @property
    def created_at(self) -> int:
        """Unix time in seconds."""
        return self._awaited.created_at

    refresh = served(AsyncServedConversation.refresh)
    respond = blocking(AsyncServedConversation.respond)
    stream = iterated(AsyncServedConversation.stream)
    fork = served(AsyncServedConversation.fork)
    rewind = served(AsyncServedConversation.rewind)
    shift = served(AsyncServedConversation.shift)
    edit = served(AsyncServedConversation.edit)
    update = served(AsyncServedConversation.update)
    items = blocking(AsyncServedConversation.items)
    add_items = blocking(AsyncServedConversation.add_items)
    item = blocking(AsyncServedConversation.item)
    delete_item = served(AsyncServedConversation.delete_item)
    export = blocking(AsyncServedConversation.export)
    delete = blocking(AsyncServedConversation.delete)


class Client(BlockingCalls[AsyncClient]):
    """A client of a Caravan server. Use it as a context manager, or `close` it; else it ends with the program.

    Its calls have the parameters and outputs of `caravan.LLM`, so that a program moves from its own model to a
    server by one line. It is for what Caravan adds to other servers: ``priority``, ``timeout``, ``choice_parameters``
    and conversations. For everything else use OpenAI's client.

    Any thread may call. An exception in a call, Ctrl-C among them, closes the connections of that call, which ends its
    generations on the server. Every call raises ApiError if the server answers with an error, ServerConnectionError if
    the connection fails, BadReplyError if another server answers, and ClosedError if the client is closed. A request
    that breaks a rule is a RequestError, a ``timeout`` that passed a DeadlineError, as they are in `caravan.LLM`.
    """

    def __init__(self, url: str, **options: Unpack[ClientOptions]) -> None:
        """``url``: that of the server. Connects with the first call. Raises ValueError, and TypeError for options."""
        client = AsyncClient(url, **options)
        self._thread = ClientThread(client.close)
        super().__init__(client, self._thread)

    def close(self) -> None:
        """End the calls that run, and close all connections. Closing it again does nothing."""
        self._thread.close()

    create_conversation = served(AsyncClient.create_conversation)
    import_conversation = served(AsyncClient.import_conversation)
    conversation = served(AsyncClient.conversation)
