"""A model with calls that are awaited."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from caravan.background import END, Call, end, following
from caravan.chat_call import Messages, SessionOptions
from caravan.chat_session import AsyncChatSession, new_session, read_session
from caravan.model_calls import ModelCalls
from caravan.opened import OpenedModel
from caravan.options import ModelOptions, ServerOptions
from caravan.server import AsyncServer

_T = TypeVar("_T")


class AsyncLLM(ModelCalls):
    """`LLM` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    The model runs on its own thread, so that it and the event loop do not wait for each other. Cancelling a call
    ends its generations.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """``async with`` loads the model. Raises nothing yet."""
        super().__init__(None)
        self._make = partial(OpenedModel, model, options)
        self._close: weakref.finalize[..., Self] | None = None

    async def __aenter__(self) -> Self:
        """Load the model, a file or a name as in `LLM`.

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        self._opened = opened = await asyncio.to_thread(self._make)
        self._close = weakref.finalize(self, opened.close)
        return self

    async def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        if self._close is not None:
            await asyncio.to_thread(self._close)

    def chat_session(self, messages: Messages = (), **options: Unpack[SessionOptions]) -> AsyncChatSession:
        """See `LLM.chat_session`."""
        return AsyncChatSession(self, new_session(messages, options))

    def load_chat_session(self, saved: str | Path | bytes) -> AsyncChatSession:
        """See `LLM.load_chat_session`."""
        return AsyncChatSession(self, read_session(saved))

    def serve(self, **options: Unpack[ServerOptions]) -> AsyncServer:
        """See `LLM.serve`: return a server that ``async with`` starts."""
        return AsyncServer(self._run, lambda: self._use().local.serve(options))

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the model's thread. Cancelling it cancels ``work``, and waits for its end."""
        here = asyncio.get_running_loop()
        ended = asyncio.Event()
        call = Call[_T]()

        def on_end() -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(ended.set)

        loop = self._use().loop
        loop.start(call, work, on_end)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            if loop.cancel(call, on_end):
                await ended.wait()
            raise
        return loop.result(call)

    async def _iterate(self, items: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        try:
            while (item := await self._run(following(items))) is not END:
                yield item
        finally:
            if self._close is not None and self._close.alive:
                await self._run(end(items))
