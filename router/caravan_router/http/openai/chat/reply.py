"""Replies of ``/v1/chat/completions``, whole and streamed."""

import time
from collections.abc import Sequence

import msgspec

from caravan_router.http.generation.answer import Reply
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, read_all
from caravan_router.http.limits import Limits
from caravan_router.http.openai.chat.output import WholeOutput, chat_logprobs
from caravan_router.http.openai.chat.schema import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChunkChoice,
)
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.openai.completion_details import completion_details
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.openai.events import EVENTS_UNTIL_DONE, token_ids_of, wants_usage
from caravan_router.http.openai.sampling import choices_of
from caravan_router.http.openai.schema import PromptTokensDetails, Usage
from caravan_router.http.server.event_stream import EventStream

_ENCODER = msgspec.json.Encoder()


class ChatReply(Reply):
    """Answers to a conversation, as text or as calls of the tools that were offered."""

    dialect = OPENAI
    framing = EVENTS_UNTIL_DONE
    operation = "chat"
    _chat: ValidChat

    def __init__(self, body: ChatRequest, limits: Limits) -> None:
        """Raises ValidationError."""
        self._body = body
        # Tokens of the thoughts of all choices that have ended.
        self._thought_tokens = 0
        self.model = body.model
        self.streamed = bool(body.stream)
        self.generations = choices_of(body, limits)

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        self._chat = await validate_chat(context, ChatSource(body=self._body), self.generations)
        self._fingerprint = context.model.fingerprint
        self._chunk = ChatCompletionChunk(
            _new_id(), "chat.completion.chunk", int(time.time()), self._chat.model, self._fingerprint, []
        )
        if wants_usage(self._body.stream_options):
            self._chunk.usage = None
        if self._body.return_token_ids:
            self._chunk.prompt_token_ids = list(self._chat.request.prompt)
        return (self._chat.request,)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        outputs = await read_whole(runs, self._chat)
        reply = ChatCompletion(_new_id(), "chat.completion", int(time.time()), self._chat.model, self._fingerprint, [])
        for index, whole in enumerate(outputs):
            logprobs = chat_logprobs(whole.pieces) if self._chat.logprobs else None
            token_ids = token_ids_of(whole.pieces) if self._body.return_token_ids else msgspec.UNSET
            self._thought_tokens += whole.output.thought_tokens
            reply.choices.append(ChatChoice(index, whole.message(), logprobs, whole.finish, token_ids))
        if self._body.return_token_ids:
            reply.prompt_token_ids = list(self._chat.request.prompt)
        reply.usage = self._usage(runs)
        return _ENCODER.encode(reply)

    async def text(self, runs: Sequence[Run]) -> str:
        """Read all runs and return the text of the first choice, or its tool calls as JSON."""
        message = (await read_whole(runs, self._chat))[0].message()
        if message.tool_calls is msgspec.UNSET:
            return message.content or ""
        return _ENCODER.encode(message.tool_calls).decode()

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        output = self._chat.output()
        token_ids = bool(self._body.return_token_ids)
        async for ready in run:
            messages = []
            for pieces in ready:
                parts = output.push(pieces, pieces[-1].finish)
                delta = output.delta(parts, always=self._chat.logprobs or token_ids)
                if not output.wanted:
                    run.end()
                if delta is not None:
                    logprobs = chat_logprobs(pieces) if self._chat.logprobs else None
                    # All choices share one chunk: it is encoded before another choice can change it.
                    ids = token_ids_of(pieces) if token_ids else msgspec.UNSET
                    self._chunk.choices = [ChunkChoice(index, delta, logprobs, output.finish, ids)]
                    messages.append(_ENCODER.encode(self._chunk))
                    # Only the first chunk has the prompt's token ids.
                    self._chunk.prompt_token_ids = msgspec.UNSET
            await events.send(*messages)
        self._thought_tokens += output.thought_tokens

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        if not wants_usage(self._body.stream_options):
            return None
        self._chunk.choices = []
        self._chunk.usage = self._usage(runs)
        return _ENCODER.encode(self._chunk)

    def _usage(self, runs: Sequence[Run]) -> Usage:
        prompt = len(self._chat.request.prompt)
        output = sum(run.tokens for run in runs)
        # The first choice computes the prompt, and the others share the result.
        cached = PromptTokensDetails(runs[0].cached_tokens)
        thoughts = self._thought_tokens if self._chat.thinks else None
        return Usage(prompt, output, prompt + output, cached, completion_details(runs, thoughts))


async def read_whole(runs: Sequence[Run], chat: ValidChat) -> list[WholeOutput]:
    """Read every run to its end. Raises EngineError."""
    outputs = [WholeOutput(chat.output(), run) for run in runs]
    await read_all(runs, [output.push for output in outputs])
    for output in outputs:
        output.end()
    return outputs


def _new_id() -> str:
    return f"chatcmpl-{time.time_ns():x}"
