"""A model with calls that block, vLLM's ``LLM``, and its twin with calls that are awaited."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from caravan.background import END, Call, end, following
from caravan.calls import BlockingCalls
from caravan.chat_session import AsyncChatSession, ChatSession, new_session, read_session
from caravan.model_calls import ModelCalls, OpenedModel
from caravan.options import ModelOptions, ServerOptions
from caravan.prompts import Messages, SessionOptions
from caravan.reprs import model_repr
from caravan.server import AsyncServer, Server
from caravan.twins import blocking

if TYPE_CHECKING:
    from caravan.engine import LLMEngine

_T = TypeVar("_T")
# Nobody waits for the next token of a list of prompts, so that steps may have larger chunks of prompts. For 64 prompts
# of 100 words and 64 tokens each, that is 3 to 6 % faster than the default of a server.
_TARGET_ITL_MS = 1000.0


class AsyncLLM(ModelCalls):
    """`LLM` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    The model runs on its own thread, so that it and the event loop do not wait for each other. Cancelling a call
    ends its generations.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """``async with`` loads the model. Raises nothing yet."""
        super().__init__(None)
        self._given = model, options
        self._make = partial(OpenedModel, model, options)
        self._close: weakref.finalize[..., AsyncLLM] | None = None

    async def __aenter__(self) -> Self:
        """Load the model, a file or a name as in `LLM`.

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        await asyncio.to_thread(self._open)
        return self

    def _open(self) -> None:
        # On the thread that loads it, so that the model has an owner also if the caller waits no longer.
        self._opened = opened = self._make()
        self._close = weakref.finalize(self, opened.close)

    def __repr__(self) -> str:
        model, options = self._given
        return model_repr("AsyncLLM", model, options, closed=self._close is not None and not self._close.alive)

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


class LLM(BlockingCalls[ModelCalls]):
    """A GGUF model in this process. Use it as a context manager, or `close` it; else it ends with the program.

    All prompts of all calls are batched continuously, as by ``caravan serve``. Any thread may call; each call blocks
    its own thread only. An exception in a call, Ctrl-C among them, ends the generations of that call and no others.

    Every generating call raises RequestError if a prompt or a parameter breaks a rule, in which case nothing has run,
    GenerationError if a generation could not continue, and ClosedError if the model is closed.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """Load ``model``, a GGUF file or a name as in docs/models.md, which may be downloaded first.

        By default prompts of a list are prefilled fast (``target_itl_ms=1000``).

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        self._given = model, options
        self._opened = OpenedModel(model, {"target_itl_ms": _TARGET_ITL_MS} | options)
        super().__init__(ModelCalls(self._opened), self._opened.loop)
        # Also at the end of the program.
        self._close = weakref.finalize(self, self._opened.close)

    def __repr__(self) -> str:
        model, options = self._given
        return model_repr("LLM", model, options, closed=not self._close.alive)

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self._close()

    embed = blocking(ModelCalls.embed)
    score = blocking(ModelCalls.score)
    decide = blocking(ModelCalls.decide)
    tokenize = blocking(ModelCalls.tokenize)
    detokenize = blocking(ModelCalls.detokenize)
    load_adapter = blocking(ModelCalls.load_adapter)
    unload_adapter = blocking(ModelCalls.unload_adapter)
    list_adapters = blocking(ModelCalls.list_adapters)
    get_default_sampling_params = blocking(ModelCalls.get_default_sampling_params)
    apply_chat_template = blocking(ModelCalls.apply_chat_template)

    @property
    def llm_engine(self) -> "LLMEngine":
        """The engine of the model, for programs with their own loop."""
        # Imported here, since an engine is made of a model.
        from caravan.engine import LLMEngine

        return LLMEngine.of(self)

    def chat_session(self, messages: Messages = (), **options: Unpack[SessionOptions]) -> ChatSession:
        """Return a conversation that keeps its turns; it begins with ``messages``, after a message of the ``system``.

        ``tools``, ``chat_template_kwargs`` and ``adapter`` are those of all turns: see `chat`.
        """
        return ChatSession(self, new_session(messages, options))

    def load_chat_session(self, saved: str | Path | bytes) -> ChatSession:
        """Return the session that `ChatSession.save` saved, from its bytes or its file. Raises StateError, OSError.

        With another model it has the same messages, whose tokens are then computed anew.
        """
        return ChatSession(self, read_session(saved))

    def serve(self, **options: Unpack[ServerOptions]) -> Server:
        """Serve the model over HTTP too, until the server is stopped or the model is closed.

        Raises ServerError if it cannot be started, and TypeError or ValueError if an option is wrong.
        """
        # Not the loop's own method, since a server keeps the model open.
        return Server(lambda work: self._loop.run(work), lambda: self._opened.local.serve(options))
