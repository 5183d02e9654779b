"""Requests by id over a model in this process, whose outputs are taken step by step. Runs on the model's event loop."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from caravan.errors import GenerationError, RequestError
from caravan.outputs import CompletionOutput, RequestOutput
from caravan.prompts import PlainPrompt
from caravan.sampling_params import SamplingParams


class Submitting(Protocol):
    """What generates."""

    async def submitted(
        self, prompt: PlainPrompt, params: SamplingParams, adapter: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check a prompt; return what runs it and yields the parts of its outputs."""
        ...


@dataclass(slots=True)
class Progress:
    """All that has come of one request."""

    request_id: str
    _outputs: dict[int, CompletionOutput] = field(default_factory=dict)
    _last: RequestOutput | None = None

    def add(self, part: RequestOutput) -> None:
        """Add the next part of one of its outputs."""
        for output in part.outputs:
            before = self._outputs.get(output.index)
            self._outputs[output.index] = output if before is None else _extended(before, output)
        self._last = part

    @property
    def is_finished(self) -> bool:
        """Whether the last part has come."""
        return self._last is not None and self._last.finished

    def output(self) -> RequestOutput:
        """Return the outputs from their beginning, as vLLM's engine does by default."""
        assert self._last is not None, "it is asked after a part has come"
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        return replace(self._last, request_id=self.request_id, outputs=outputs)


def _extended(before: CompletionOutput, part: CompletionOutput) -> CompletionOutput:
    logprob, logprobs = part.cumulative_logprob, part.logprobs
    return replace(
        part,
        text=before.text + part.text,
        token_ids=[*before.token_ids, *part.token_ids],
        cumulative_logprob=None if logprob is None else (before.cumulative_logprob or 0.0) + logprob,
        logprobs=None if logprobs is None else [*(before.logprobs or ()), *logprobs],
    )


class EngineRequests:
    """The requests that have been added and have not ended. Those that run go on between two steps."""

    def __init__(self, model: Submitting) -> None:
        self._model = model
        # A request is here until its last output was taken.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ready: dict[str, Progress] = {}
        self._failed: dict[str, BaseException] = {}
        self._news = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    async def add(self, request_id: str, prompt: PlainPrompt, params: SamplingParams, adapter: str) -> None:
        """Check a request and start it. Raises RequestError, also for the id of a request that has not ended."""
        self._check_new(request_id)
        parts = await self._model.submitted(prompt, params, adapter)
        # Another thread may have added the same one in the meantime.
        self._check_new(request_id)
        self._tasks[request_id] = asyncio.create_task(self._follow(Progress(request_id), parts))

    def _check_new(self, request_id: str) -> None:
        if request_id in self._tasks:
            raise RequestError(f"request_id must differ from those of unfinished requests. Given: {request_id!r:.80}")

    async def _follow(self, progress: Progress, parts: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with aclosing(parts):
                async for part in parts:
                    progress.add(part)
                    self._ready[progress.request_id] = progress
                    self._news.set()
        except Exception as error:  # noqa: BLE001 - the next step raises it
            self._failed[progress.request_id] = error
            self._news.set()

    async def step(self) -> list[RequestOutput]:
        """Wait until any request has more output; return those that have. Without requests, return [] at once.

        Raises GenerationError for a request that has failed, which then is no more.
        """
        while self._tasks and not (self._ready or self._failed):
            self._news.clear()
            await self._news.wait()
        for request_id, error in self._failed.items():
            del self._failed[request_id]
            self._forget([request_id])
            if isinstance(error, GenerationError):
                error.request_id = request_id
            raise error
        ready = list(self._ready.values())
        self._ready.clear()
        self._forget([progress.request_id for progress in ready if progress.is_finished])
        return [progress.output() for progress in ready]

    async def abort(self, request_ids: Collection[str]) -> None:
        """End requests; those that are no more are ignored. No step returns anything of them."""
        tasks = [task for request_id in request_ids if (task := self._tasks.get(request_id)) is not None]
        self._forget(request_ids)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._forget(request_ids)
        # Nothing may be left that a step waits for.
        self._news.set()

    async def end(self) -> None:
        """End all requests."""
        await self.abort(list(self._tasks))

    def _forget(self, request_ids: Collection[str]) -> None:
        for request_id in request_ids:
            self._tasks.pop(request_id, None)
            self._ready.pop(request_id, None)
            self._failed.pop(request_id, None)
