"""Replies of ``/v1/chat/completions``, whole and streamed."""

import time
from collections.abc import Sequence

import msgspec

from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.progress import PromptProgress, with_progress
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.generation.serving import used_tier
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.aliases import with_limit
from caravan_dialects.api.openai.chat.output import Part, WholeOutput, chat_logprobs, read_whole
from caravan_dialects.api.openai.chat.schema import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from caravan_dialects.api.openai.chat.truncation import validate_chat
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat
from caravan_dialects.api.openai.choices import choices_of
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.events import (
    EVENTS_UNTIL_DONE,
    new_call_id,
    token_ids_of,
    wants_usage,
    wants_usage_of_each,
)
from caravan_dialects.api.openai.schema import Usage
from caravan_dialects.api.openai.usage import (
    completion_details,
    progress_shown,
    prompt_details,
    timings_at,
    timings_of,
)
from caravan_dialects.api.stream import Events
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_scheduler.core.prompt_media import text_ids

_ENCODER = msgspec.json.Encoder()


class AskedChat(Asked):
    """The next message of a conversation."""

    dialect = OPENAI
    framing = EVENTS_UNTIL_DONE
    operation = "chat"

    def __init__(self, body: ChatRequest, limits: Limits) -> None:
        """Raises ValidationError."""
        body = with_limit(body)
        self._body = body
        self._choices = choices_of(body, limits)
        self.model = body.model
        self.streamed = bool(body.stream)
        self.generations = self._choices.candidates

    async def validate(self, context: Context) -> "ChatAnswer":
        chat = await validate_chat(context, ChatSource(body=self._body), self._choices)
        return ChatAnswer(self._body, chat, context.model.digest)


class ChatAnswer(Answer):
    """Choices of the next message, as text or as calls of the tools that were offered."""

    def __init__(self, body: ChatRequest, chat: ValidChat, fingerprint: str) -> None:
        super().__init__((chat.request,))
        self._body = body
        self._chat = chat
        self._fingerprint = fingerprint
        # Tokens of the thoughts of all candidates that have ended.
        self._thought_tokens = 0
        self.reply_id = f"chatcmpl-{time.time_ns():x}"
        self._chunk = ChatCompletionChunk(
            self.reply_id, "chat.completion.chunk", int(time.time()), chat.model, fingerprint, []
        )
        if wants_usage(body.stream_options):
            self._chunk.usage = None
        if body.return_token_ids:
            self._chunk.prompt_token_ids = text_ids(chat.request.prompt)
        self._chunk.truncated = chat.left_out or msgspec.UNSET
        if body.service_tier is not None:
            self._chunk.service_tier = used_tier(chat.request.specs[0].priority)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        outputs = await self._read(runs)
        reply = ChatCompletion(
            self.reply_id, "chat.completion", int(time.time()), self._chat.model, self._fingerprint, []
        )
        self._thought_tokens = sum(output.output.thought_tokens for output in outputs)
        for index, whole in enumerate(self._chat.best(outputs)):
            logprobs = chat_logprobs(whole.pieces) if self._chat.logprobs else None
            token_ids = token_ids_of(whole.pieces) if self._body.return_token_ids else msgspec.UNSET
            reply.choices.append(ChatChoice(index, whole.message(), logprobs, whole.finish, token_ids))
        if self._body.return_token_ids:
            reply.prompt_token_ids = text_ids(self._chat.request.prompt)
        reply.truncated = self._chat.left_out or msgspec.UNSET
        reply.usage = self._usage(runs)
        reply.service_tier = self._chunk.service_tier
        if self._body.timings_per_token:
            reply.timings = timings_of(runs[0], runs[0].tokens)
        return _ENCODER.encode(reply)

    async def text(self, runs: Sequence[Run]) -> str:
        """Read all runs and return the text of the first choice, or its tool calls as JSON."""
        message = self._chat.best(await self._read(runs))[0].message()
        if message.tool_calls is msgspec.UNSET:
            return message.content or ""
        return _ENCODER.encode(message.tool_calls).decode()

    async def _read(self, runs: Sequence[Run]) -> list[WholeOutput]:
        return await read_whole([self._chat.output(run) for run in runs])

    async def send(self, events: Events, index: int, run: Run) -> None:
        output, deltas = self._chat.output(run), Deltas()
        token_ids = bool(self._body.return_token_ids)
        every = self._chat.logprobs or token_ids

        async def tell(progress: PromptProgress) -> None:
            self._chunk.choices = [ChunkChoice(index, Delta(), None, None)]
            self._chunk.prompt_progress = progress_shown(progress)
            if self._body.timings_per_token:
                self._chunk.timings = timings_at(progress)
            data = _ENCODER.encode(self._chunk)
            self._chunk.prompt_progress = self._chunk.timings = msgspec.UNSET
            await events.send(data)

        async for ready in with_progress(run, tell) if self._body.return_progress else run:
            messages = []
            for pieces in ready:
                parts = output.push(pieces)
                delta = deltas.next(parts, needed=every or output.finish is not None)
                if delta is not None:
                    logprobs = chat_logprobs(pieces) if self._chat.logprobs else None
                    # All choices share one chunk: it is encoded before another choice can change it.
                    ids = token_ids_of(pieces) if token_ids else msgspec.UNSET
                    self._chunk.choices = [ChunkChoice(index, delta, logprobs, output.finish, ids)]
                    self._note_progress(run)
                    messages.append(_ENCODER.encode(self._chunk))
                    # Only the first chunk tells about the prompt.
                    self._chunk.prompt_token_ids = self._chunk.truncated = msgspec.UNSET
            await events.send(*messages)
        self._thought_tokens += output.thought_tokens

    def _note_progress(self, run: Run) -> None:
        """Let the next chunk tell how many tokens of ``run`` there are, and how long they took, if it is asked for."""
        if wants_usage_of_each(self._body.stream_options):
            prompt = len(self._chat.request.prompt)
            self._chunk.usage = Usage(prompt, run.tokens, prompt + run.tokens, prompt_details(run))
        if self._body.timings_per_token:
            self._chunk.timings = timings_of(run, run.tokens)

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        if not wants_usage(self._body.stream_options):
            return None
        self._chunk.choices = []
        self._chunk.timings = msgspec.UNSET
        self._chunk.usage = self._usage(runs)
        return _ENCODER.encode(self._chunk)

    def _usage(self, runs: Sequence[Run]) -> Usage:
        prompt = len(self._chat.request.prompt)
        output = sum(run.tokens for run in runs)
        thoughts = self._thought_tokens if self._chat.thinks else None
        return Usage(prompt, output, prompt + output, prompt_details(runs[0]), completion_details(runs, thoughts))


class Deltas:
    """Makes the deltas of one choice. The first has the role."""

    __slots__ = ("_started",)

    def __init__(self) -> None:
        self._started = False

    def next(self, parts: Sequence[Part], *, needed: bool) -> Delta | None:
        """Return the delta of ``parts``; None if there is nothing to send: an incomplete character or call.

        ``needed``: return an empty delta instead of None.
        """
        if not parts and not needed:
            return None
        delta = Delta()
        if not self._started:
            self._started = True
            delta.role = "assistant"
        if thought := "".join(part.text for part in parts if isinstance(part, ThoughtPart)):
            delta.reasoning_content = delta.reasoning = thought
        if text := "".join(part.text for part in parts if isinstance(part, TextPart)):
            delta.content = text
        elif delta.role is not msgspec.UNSET and not parts:
            # An output without text or calls has an empty text, as in OpenAI's API.
            delta.content = ""
        if calls := _call_deltas(parts):
            delta.tool_calls = calls
        return delta


def _call_deltas(parts: Sequence[Part]) -> list[ToolCallDelta]:
    """Merge the parts of a chunk into one delta per call: some clients treat every entry as a new call."""
    calls: list[ToolCallDelta] = []
    for part in parts:
        if not isinstance(part, CallPart):
            continue
        if part.name is not None:
            function = FunctionDelta(part.arguments, part.name)
            calls.append(ToolCallDelta(part.index, function, id=new_call_id(), type="function"))
        elif calls and calls[-1].index == part.index:
            calls[-1].function.arguments += part.arguments
        else:
            calls.append(ToolCallDelta(part.index, FunctionDelta(part.arguments)))
    return calls
