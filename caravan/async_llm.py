"""A model with calls that are awaited."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from caravan.errors import ClosedError
from caravan.llm import CHAT_PARAMS, Messages, chat_options, for_each, split_conversations, texts_of
from caravan.opened import OpenedModel
from caravan.options import ModelOptions
from caravan.outputs import EmbeddingRequestOutput, RequestOutput, ScoringRequestOutput
from caravan.prompts import Prompt, Prompts, plain_prompts
from caravan.sampling_params import SamplingParams

_T = TypeVar("_T")


class AsyncLLM:
    """`LLM` for asyncio: the same calls with the same meaning, awaited. Use it as an asynchronous context manager.

    The model runs on a thread of its own, so that it and the event loop do not wait for each other. Cancelling a call
    ends its generations.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """``async with`` loads the model. Raises nothing yet."""
        self._model, self._options = model, options
        self._opened: OpenedModel | None = None
        self._close: weakref.finalize[..., Self] | None = None

    async def __aenter__(self) -> Self:
        """Load the model. Raises ModelError, and TypeError or ValueError if an option is wrong."""
        self._opened = opened = await asyncio.to_thread(OpenedModel, self._model, self._options)
        self._close = weakref.finalize(self, opened.close)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        if self._close is not None:
            await asyncio.to_thread(self._close)

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """See `LLM.generate`."""
        plain = plain_prompts(prompts)
        params = for_each(sampling_params or SamplingParams(), len(plain))
        return await self._run(self._use().local.generate(plain, params, adapter, _ignore))

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, adapter: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `LLM.stream`."""
        (plain,) = plain_prompts(prompt)
        async for part in self._iterate(self._use().local.stream(plain, sampling_params or SamplingParams(), adapter)):
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
        """See `LLM.chat`."""
        conversations = split_conversations(messages)
        params = for_each(sampling_params or CHAT_PARAMS, len(conversations))
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        return await self._run(self._use().local.chat(conversations, params, options, adapter, _ignore))

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
        """See `LLM.stream_chat`."""
        options = chat_options(tools, tool_choice, schema, chat_template_kwargs)
        params = sampling_params or CHAT_PARAMS
        async for part in self._iterate(self._use().local.stream_chat(messages, params, options, adapter)):
            yield part

    async def embed(self, prompts: Prompts) -> list[EmbeddingRequestOutput]:
        """See `LLM.embed`."""
        return await self._run(self._use().local.embed(plain_prompts(prompts)))

    async def score(self, data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[ScoringRequestOutput]:
        """See `LLM.score`."""
        return await self._run(self._use().local.score(texts_of(data_1), texts_of(data_2)))

    async def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """See `LLM.tokenize`."""
        return await self._run(self._use().local.tokenize(text, add_special=add_special))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `LLM.detokenize`."""
        return await self._run(self._use().local.detokenize(token_ids))

    def _use(self) -> OpenedModel:
        if self._opened is None:
            raise ClosedError("the model is not open: use `async with`")
        return self._opened

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run ``work`` on the model's thread. Cancelling it cancels ``work``, and waits for its end."""
        here = asyncio.get_running_loop()
        ended = asyncio.Event()
        tasks: list[asyncio.Task[_T]] = []

        def on_end(_task: object = None) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(ended.set)

        loop = self._use().loop
        loop.start(work, tasks, on_end)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            if loop.cancel(tasks, on_end):
                await ended.wait()
            raise
        try:
            return tasks[0].result()
        except asyncio.CancelledError:
            raise ClosedError("the model was closed before the call had ended") from None

    async def _iterate(self, items: AsyncGenerator[_T, None]) -> AsyncGenerator[_T, None]:
        end = object()

        async def following() -> Any:
            return await anext(items, end)

        try:
            while (item := await self._run(following())) is not end:
                yield item
        finally:
            if self._close is not None and self._close.alive:
                await self._run(_end(items))


async def _end(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


def _ignore(_output: RequestOutput) -> None:
    """Take an output that nobody counts."""
