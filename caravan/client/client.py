"""A client with calls that block."""

from typing import Unpack

from caravan.calls import BlockingCalls
from caravan.client.async_client import AsyncClient, ClientOptions
from caravan.client.client_thread import ClientThread
from caravan.client.served_conversation import served


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
