"""An executor whose calls are awaited."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from threading import Lock
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack

from caravan.conversation import GREEDY, Conversation, Inference, State
from caravan.errors import ClosedError
from caravan.executor import Executor
from caravan.executor_sampling import Sampler, Stop
from caravan.media import PlacedMedia
from caravan.options import ExecutorOptions
from caravan.outputs import Token
from caravan.processes import OpeningProcess
from caravan.twins import AsyncClosing

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Owner = TypeVar("_Owner", Executor, Conversation)


class _End:
    """Comes after the last token."""


class _Thread:
    """A thread that runs calls one after another, in the order in which they were made."""

    def __init__(self) -> None:
        self._process = OpeningProcess()
        self._pool = ThreadPoolExecutor(1, "caravan-executor")
        self._last: Future[None] | None = None
        self._generations = 0
        self._counting = Lock()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count a generation. Tasks of several event loops may."""
        with self._counting:
            self._generations += 1
        try:
            yield
        finally:
            with self._counting:
                self._generations -= 1

    def next_move(self, moves: Iterator[Token | None], end: _End) -> Token | _End | None:
        """Return the next of ``moves``, or ``end``. A generation that is alone waits for no others before a step."""
        move = next(moves, end)
        return next(moves, end) if move is None and self._generations == 1 else move

    async def run(self, work: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Return what ``work`` returns. Raises ClosedError, ForkedError.

        If this is cancelled, a call that has not started never starts. One that runs is waited for, since a step of
        llama.cpp cannot be interrupted; a conversation that it returns is closed.
        """
        self._process.check("executor")
        try:
            call = self._pool.submit(work, *args, **kwargs)
        except RuntimeError:
            raise ClosedError("the executor is closed") from None
        try:
            return await _result(call)
        except asyncio.CancelledError:
            call.cancel()
            made = await _outcome(call)
            if isinstance(made, Conversation):
                # Where the thread is about to end, all conversations are closed anyway.
                with suppress(RuntimeError):
                    await _outcome(self._pool.submit(made.close))
            raise

    async def end(self, last: Callable[[], None]) -> None:
        """Run ``last`` after all earlier calls, and end the thread. If this is cancelled, both happen later.

        In a forked child, this does nothing.
        """
        if not self._process.is_this:
            return
        if self._last is None:
            self._last = self._pool.submit(last)
            self._pool.shutdown(wait=False)
        await _result(self._last)
        # Nothing is left to run, so this does not block.
        self._pool.shutdown()


async def _result(call: "Future[_R]") -> _R:
    """Wait for ``call`` and return its result. Cancelling this does not cancel ``call``."""
    return await asyncio.shield(asyncio.wrap_future(call))


async def _outcome(call: "Future[_R]") -> _R | None:
    """Wait for ``call``, even if this is cancelled; return its result, None if it failed or was cancelled."""
    ended = asyncio.wrap_future(call)
    while not ended.done():
        # The caller raises CancelledError anyway.
        with suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    return None if ended.cancelled() or ended.exception() is not None else ended.result()


class _Remote(Generic[_Owner]):
    """Something that is used on the executor's thread only."""

    _thread: _Thread

    def _use(self) -> _Owner:
        """Return what the thread uses. Raises ClosedError."""
        raise NotImplementedError

    async def _run(self, work: Callable[Concatenate[_Owner, _P], _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await self._thread.run(work, self._use(), *args, **kwargs)


def _awaited(
    method: Callable[Concatenate[_Owner, _P], _R],
) -> Callable[Concatenate[_Remote[_Owner], _P], Coroutine[Any, Any, _R]]:
    """Make an awaited method of one of `Executor` or `Conversation`."""

    @wraps(method)
    async def call(self: _Remote[_Owner], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return await self._run(method, *args, **kwargs)

    return call


class AsyncConversation(_Remote[Conversation], AsyncClosing):
    """`Conversation` for asyncio: the same calls with the same meaning, awaited. `AsyncExecutor.create` makes it.

    Two are equal if they are the same conversation. A sampler, a criterion or an edit that is a function runs on the
    executor's thread.
    """

    def __init__(self, thread: _Thread, conversation: Conversation) -> None:
        """Use `AsyncExecutor.create`."""
        self._thread, self._conversation = thread, conversation

    def __eq__(self, other: object) -> bool:
        """Say whether ``other`` is the same conversation."""
        return isinstance(other, AsyncConversation) and self._conversation is other._conversation

    def __hash__(self) -> int:
        """Return the hash of the conversation."""
        return hash(self._conversation)

    __repr__ = Conversation.__repr__

    @property
    def state(self) -> State:
        """The stage of the conversation, now."""
        return self._conversation.state

    @property
    def tokens(self) -> list[int]:
        """All token ids, those that wait included, now."""
        return self._conversation.tokens

    @property
    def token_count(self) -> int:
        """Number of tokens, those that wait included, now."""
        return self._conversation.token_count

    prompt = _awaited(Conversation.prompt)
    prompt_messages = _awaited(Conversation.prompt_messages)
    logits = _awaited(Conversation.logits)
    sample = _awaited(Conversation.sample)
    rewind = _awaited(Conversation.rewind)
    shift_left = _awaited(Conversation.shift_left)
    modify = _awaited(Conversation.modify)
    remove = _awaited(Conversation.remove)
    unload = _awaited(Conversation.unload)
    save = _awaited(Conversation.save)

    async def text(self) -> str:
        """Return the text of all tokens, without control tokens."""
        return await self._run(lambda conversation: conversation.text)

    async def media(self) -> list[PlacedMedia]:
        """See `Conversation.media`."""
        return await self._run(lambda conversation: conversation.media)

    async def fork(self) -> "AsyncConversation":
        """See `Conversation.fork`."""
        return AsyncConversation(self._thread, await self._run(Conversation.fork))

    async def generate(
        self, max_tokens: int | None = None, sampler: Sampler = GREEDY, stop: Stop | None = None
    ) -> AsyncGenerator[Token, None]:
        """See `Conversation.generate`. Conversations that generate at the same time share their steps."""
        moves, end = self._conversation.generation(max_tokens, sampler, stop), _End()
        with self._thread.generating():
            while (move := await self._run(lambda _: self._thread.next_move(moves, end))) is not end:
                if isinstance(move, Token):
                    yield move

    async def close(self) -> None:
        """End it, and free its cells. Closing it again does nothing."""
        if self.state is not State.ENDED:
            await self._run(Conversation.close)

    def _use(self) -> Conversation:
        return self._conversation


class AsyncExecutor(_Remote[Executor], AsyncClosing):
    """`Executor` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    The model has its own thread, where calls run one after another, so that the event loop never waits for a step.
    Tasks of any number of event loops may use it. A call that is cancelled before it starts changes nothing. One that
    runs is waited for, and what it did stays, except a conversation that it made, which is closed.
    """

    def __init__(self, model: str | Path, **options: Unpack[ExecutorOptions]) -> None:
        """``async with`` loads the model. Raises nothing yet."""
        self._thread = _Thread()
        self._make: Callable[[], Executor] = partial(Executor, model, **options)
        self._executor: Executor | None = None

    @classmethod
    def open(cls, path: str | Path, model: str | Path | None = None, **options: Unpack[ExecutorOptions]) -> Self:
        """Return an executor for which ``async with`` does what `Executor.open` does."""
        executor = cls(path)
        executor._make = partial(Executor.open, path, model, **options)
        return executor

    async def __aenter__(self) -> Self:
        """Load the model. Raises ModelError, StateError, OSError; TypeError or ValueError if an option is wrong."""
        try:
            await self._thread.run(self._load)
        except BaseException:
            await self.close()
            raise
        return self

    def _load(self) -> None:
        self._executor = self._make()

    async def close(self) -> None:
        """Wait for the calls that were made, end all conversations, and free the model.

        Closing it again does nothing. If this is cancelled, it is closed all the same.
        """
        await self._thread.end(self._free)

    def _free(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def __repr__(self) -> str:
        return "<AsyncExecutor: not open>" if self._executor is None else f"Async{self._executor!r}"

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens of the vocabulary, the length of a row of logits."""
        return self._use().vocabulary_size

    tokenize = _awaited(Executor.tokenize)
    save = _awaited(Executor.save)

    async def conversations(self) -> tuple[AsyncConversation, ...]:
        """Return all conversations that are not closed, in the order in which they were made."""
        return self._wrapped(await self._run(lambda executor: executor.conversations))

    async def create(self) -> AsyncConversation:
        """See `Executor.create`."""
        return AsyncConversation(self._thread, await self._run(Executor.create))

    async def load(self, saved: str | Path | bytes) -> AsyncConversation:
        """See `Executor.load`."""
        return AsyncConversation(self._thread, await self._run(Executor.load, saved))

    async def infer(self) -> Inference[AsyncConversation]:
        """See `Executor.infer`."""
        did = await self._run(Executor.infer)
        return Inference(self._wrapped(did.done), self._wrapped(did.waiting), self._wrapped(did.starved))

    def _wrapped(self, conversations: tuple[Conversation, ...]) -> tuple[AsyncConversation, ...]:
        return tuple(AsyncConversation(self._thread, conversation) for conversation in conversations)

    def _use(self) -> Executor:
        if self._executor is None:
            raise ClosedError("the executor is not open: use `async with`")
        return self._executor
