"""A model on a server."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from caravan.calls import OnOutput
from caravan.client import bodies
from caravan.client.connection import Answer, Call, Connection
from caravan.client.reading import ChatChunks, OutputReader, read_chat, read_completion, read_completion_chunk
from caravan.outputs import RequestOutput
from caravan.prompts import ChatCall, Messages, PlainPrompt
from caravan.sampling_params import SamplingParams

_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"


class RemoteModel:
    """A `Model` over a connection, which sends nothing unless all entries of a call have a body."""

    def __init__(self, connection: Connection, name: str, parallel: int) -> None:
        """``name``: for calls that name no adapter. ``parallel``: most entries of a call on the server at a time."""
        self._connection = connection
        self.name = name
        self._parallel = parallel

    async def generate(
        self, prompts: Sequence[PlainPrompt], params: Sequence[SamplingParams], adapter: str, on_output: OnOutput
    ) -> list[RequestOutput]:
        """Generate for all prompts, each with its own parameters."""
        model = adapter or self.name
        calls = [
            _posted(_COMPLETIONS, bodies.completion(prompt, own, model, stream=False))
            for prompt, own in zip(prompts, params, strict=True)
        ]
        return await self._ask_all(calls, lambda number, answer: read_completion(prompts[number], answer), on_output)

    def stream(self, prompt: PlainPrompt, params: SamplingParams, adapter: str) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the outputs of one prompt as they come."""
        body = bodies.completion(prompt, params, adapter or self.name, stream=True)

        def reader(request_id: str) -> OutputReader:
            return OutputReader(request_id, prompt, body.get("n", 1), read_completion_chunk)

        return self._connection.stream(_posted(_COMPLETIONS, body), reader)

    async def chat(
        self, conversations: Sequence[Messages], params: Sequence[SamplingParams], call: ChatCall, on_output: OnOutput
    ) -> list[RequestOutput]:
        """Answer all conversations."""
        model = call.adapter or self.name
        calls = [
            _posted(_CHAT, bodies.chat(conversation, own, call, model, stream=False))
            for conversation, own in zip(conversations, params, strict=True)
        ]
        return await self._ask_all(calls, lambda _, answer: read_chat(answer), on_output)

    def stream_chat(
        self, messages: Messages, params: SamplingParams, call: ChatCall
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the parts of the answers to one conversation as they come."""
        body = bodies.chat(messages, params, call, call.adapter or self.name, stream=True)

        def reader(request_id: str) -> OutputReader:
            return OutputReader(request_id, None, body.get("n", 1), ChatChunks())

        return self._connection.stream(_posted(_CHAT, body), reader)

    async def _ask_all(
        self, calls: Sequence[Call], read: Callable[[int, Answer], RequestOutput], on_output: OnOutput
    ) -> list[RequestOutput]:
        """Return what is read of each reply, by the number of its call. The first error cancels the rest."""
        turns = asyncio.Semaphore(self._parallel)

        async def one(number: int) -> RequestOutput:
            async with turns:
                try:
                    output = read(number, await self._connection.ask(calls[number]))
                except Exception as error:
                    if len(calls) > 1:
                        error.add_note(f"at entry {number} of {len(calls)}")
                    raise
            on_output(output)
            return output

        tasks = [asyncio.ensure_future(one(number)) for number in range(len(calls))]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _posted(path: str, body: Mapping[str, Any]) -> Call:
    return Call(method="POST", path=path, body=body)
