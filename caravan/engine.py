"""The engine as such, for programs with their own loop: vLLM's ``LLMEngine``, and its asynchronous twin."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Self, Unpack

from caravan.engine_requests import Progress
from caravan.errors import RequestError
from caravan.llm import LLM, AsyncLLM
from caravan.options import ModelOptions
from caravan.outputs import RequestOutput
from caravan.prompts import Prompt, params_or, plain_prompt
from caravan.sampling_params import SamplingParams
from caravan.twins import AsyncClosing, Closing


class EngineArgs:
    """What opens an engine: vLLM's ``EngineArgs``, with the names of `ModelOptions`."""

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        """``model``, ``options``: see `LLM`. Raises nothing yet."""
        self.model = model
        self.options = options


class LLMEngine(Closing):
    """A model in this process that takes requests by id, and hands out what has come of them, step by step.

    The scheduler is that of `LLM`: requests are batched continuously, and go on between two steps, so that a program
    may do something else. Use it as a context manager, or `close` it; else it ends with the program.
    """

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        """Load ``model``: see `LLM`. Raises ModelError, and TypeError or ValueError if an option is wrong."""
        self._over(LLM(model, **options))

    def _over(self, llm: LLM) -> None:
        self._llm = llm
        self._requests = llm._opened.local.requests

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model of ``engine_args``."""
        return cls(engine_args.model, **engine_args.options)

    @classmethod
    def of(cls, llm: LLM) -> Self:
        """Return the engine of a model that is open. Closing it closes the model."""
        engine = cls.__new__(cls)
        engine._over(llm)
        return engine

    def __repr__(self) -> str:
        return f"<LLMEngine: {len(self._requests)} requests, {self._llm!r}>"

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str = ""
    ) -> None:
        """Check a request and let it run. ``prompt``, ``params``, ``adapter``: see `LLM.generate`.

        Raises RequestError, also if ``request_id`` is that of an unfinished request, and ClosedError.
        """
        _check_id(request_id)
        plain, own = plain_prompt(prompt), params_or(params)
        self._llm._loop.run(self._requests.add(request_id, plain, own, adapter))

    def step(self) -> list[RequestOutput]:
        """Wait until any request has more output; return those that have, each from the beginning of its outputs.

        Without unfinished requests, return [] at once. Raises GenerationError if a request has failed, which is then no
        more; its id is ``request_id`` of the error, and others go on.
        """
        return self._llm._loop.run(self._requests.step())

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several. Those that are no more are ignored, and no step returns anything of them."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._llm._loop.run(self._requests.abort(ids))

    def has_unfinished_requests(self) -> bool:
        """Return whether any request has output that no step has returned yet."""
        return bool(len(self._requests))

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests with output that no step has returned yet."""
        return len(self._requests)

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self._llm.close()


class AsyncLLMEngine(AsyncClosing):
    """`LLMEngine` for asyncio, as in vLLM: each request is an iterator of its outputs so far.

    The model is loaded by ``async with``, or by the first request.
    """

    def __init__(self, model: str, **options: Unpack[ModelOptions]) -> None:
        """Raises nothing yet."""
        self._llm = AsyncLLM(model, **options)
        self._opening = asyncio.Lock()
        # A request is here until it has ended or is aborted.
        self._running: dict[str, _Running] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an engine for the model of ``engine_args``."""
        return cls(engine_args.model, **engine_args.options)

    def __repr__(self) -> str:
        return f"<AsyncLLMEngine: {len(self._running)} requests, {self._llm!r}>"

    async def __aenter__(self) -> Self:
        """Load the model. Raises ModelError, and TypeError or ValueError if an option is wrong."""
        async with self._opening:
            if self._llm._opened is None:
                await self._llm.__aenter__()
        return self

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None, request_id: str, *, adapter: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request from their beginning, each time there is more. Closing it ends the request.

        After `abort` it ends. Raises what `LLM.generate` raises, and RequestError for the id of another that runs.
        """
        _check_id(request_id)
        if request_id in self._running:
            raise RequestError(f"request_id must differ from those of unfinished requests. Given: {request_id!r:.80}")
        running = self._running[request_id] = _Running()
        try:
            await self.__aenter__()
            async with aclosing(self._llm.stream(prompt, sampling_params, adapter=adapter)) as parts:
                progress = Progress(request_id)
                while not running.aborted and (part := await running.next(parts)) is not None:
                    progress.add(part)
                    yield progress.output()
        finally:
            # After `abort`, another request may have the id.
            if self._running.get(request_id) is running:
                del self._running[request_id]

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several. Those that are no more are ignored."""
        for one in [request_id] if isinstance(request_id, str) else list(request_id):
            if (running := self._running.pop(one, None)) is not None:
                running.abort()

    async def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        await self._llm.close()


class _Running:
    """A request of an asynchronous engine."""

    def __init__(self) -> None:
        self.aborted = False
        self._part: asyncio.Future[RequestOutput | None] | None = None

    async def next(self, parts: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        """Wait for the next of ``parts``; return None after the last one, and when the request is aborted."""
        part = self._part = asyncio.ensure_future(anext(parts, None))
        try:
            await asyncio.wait([part])
        except asyncio.CancelledError:
            part.cancel()
            await asyncio.wait([part])
            raise
        return None if part.cancelled() else part.result()

    def abort(self) -> None:
        """Let no further part come."""
        self.aborted = True
        if self._part is not None:
            self._part.cancel()


def _check_id(request_id: str) -> None:
    if not isinstance(request_id, str):
        raise RequestError(f"request_id must be a str. Given: {request_id!r:.80}")
