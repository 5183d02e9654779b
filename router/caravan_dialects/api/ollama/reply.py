"""Replies of Ollama's routes: lines of JSON, or one whole object."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from caravan_dialects.api.body import object_of
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.errors import OLLAMA
from caravan_dialects.api.ollama.validation import bare_name
from caravan_dialects.api.openai.chat.output import ChatOutput, Collected, Part, chat_logprobs, read_outputs
from caravan_dialects.api.openai.chat.schema import TokenLogprob
from caravan_dialects.api.openai.chat.truncation import validate_chat
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat
from caravan_dialects.api.stream import LINES, Events
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import IncrementalDecoder
from caravan_proto.messages.results import FinishReason

NANOSECONDS = 1_000_000_000

_ENCODER = msgspec.json.Encoder()

OllamaReply = ollama.OllamaGenerateReply | ollama.OllamaChatReply


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A whole output, or its next part. Its thoughts precede its text."""

    thinking: str = ""
    text: str = ""
    calls: Sequence[ollama.OllamaToolCall] = ()


NOTHING = Said()
# Makes a reply, or one line of it, from the model's name and what the model said.
Shape = Callable[[str, Said], OllamaReply]


class AskedOllama(Asked):
    """The output for one prompt or conversation, in the form of ``shape``."""

    dialect = OLLAMA
    framing = LINES

    def __init__(self, body: ollama.OllamaFields, read: Callable[[Context], ChatSource], shape: Shape) -> None:
        """``read``: turns the body into a chat request; raises ValidationError."""
        self._read = read
        self.model = bare_name(body.model)
        self._shape = shape
        self._with_context = isinstance(body, ollama.OllamaGenerateRequest) and not body.raw
        if isinstance(body, ollama.OllamaChatRequest):
            self.operation = "chat"
        self.streamed = body.stream is not False

    async def validate(self, context: Context) -> "OllamaAnswer":
        chat = await validate_chat(context, self._read(context))
        return OllamaAnswer(chat, self._shape, with_context=self._with_context)


class OllamaAnswer(Answer):
    """One output."""

    def __init__(self, chat: ValidChat, shape: Shape, *, with_context: bool) -> None:
        """``with_context``: the reply has the tokens of prompt and output, so that a prompt can continue them."""
        super().__init__((chat.request,))
        self._chat = chat
        self._shape = shape
        # Tokens whose log probabilities are not sent yet, if these are asked for.
        self._unsent: list[Piece] | None = [] if chat.logprobs else None
        # The output so far, for a reply with a context. Token ids cannot tell what was in a picture.
        has_text_only = chat.request.specs[0].media is None
        self._pieces: list[Piece] | None = [] if with_context and has_text_only else None

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [run] = runs
        output, collected = self._chat.output(run), Collected()

        def take(pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
            self._note(pieces)
            collected.add(parts)

        await read_outputs([output], [take])
        reply = self._shape(self._chat.model, _said(collected, ended=True))
        reply.logprobs = self._take_logprobs()
        self._finish(reply, output)
        return _ENCODER.encode(reply)

    async def send(self, events: Events, index: int, run: Run) -> None:
        output, collected = self._chat.output(run), Collected()
        model = self._chat.model
        async for ready in run:
            messages = []
            for pieces in ready:
                self._note(pieces)
                collected.add(output.push(pieces))
                said = _said(collected, ended=output.finish is not None)
                if said != NOTHING:
                    line = self._shape(model, said)
                    line.logprobs = self._take_logprobs()
                    messages.append(_ENCODER.encode(line))
            await events.send(*messages)
        last = self._shape(model, NOTHING)
        last.logprobs = self._take_logprobs()
        self._finish(last, output)
        await events.send(_ENCODER.encode(last))

    def _note(self, pieces: Sequence[Piece]) -> None:
        if self._pieces is not None:
            self._pieces += pieces
        if self._unsent is not None:
            self._unsent += pieces

    def _take_logprobs(self) -> list[TokenLogprob] | None:
        """Return the log probabilities of the tokens since the last call; None for none."""
        if not self._unsent:
            return None
        taken, self._unsent = self._unsent, []
        return chat_logprobs(taken).content

    def _finish(self, reply: OllamaReply, output: ChatOutput) -> None:
        run = output.run
        timings = run.timings()
        reply.done = True
        reply.done_reason = "length" if output.finish == "length" else "stop"
        reply.total_duration = int(timings.total_s * NANOSECONDS)
        reply.load_duration = 0
        reply.prompt_eval_count = len(self._chat.request.prompt)
        reply.prompt_eval_duration = int(timings.prefill_s * NANOSECONDS)
        reply.eval_count = run.tokens
        reply.eval_duration = int(timings.decode_s * NANOSECONDS)
        if self._pieces is not None and isinstance(reply, ollama.OllamaGenerateReply):
            reply.context = [*self._chat.request.prompt, *_shown_token_ids(self._pieces)]


def _shown_token_ids(pieces: Sequence[Piece]) -> list[int]:
    """Return the ids of the tokens without those of a stop string that was cut off the text."""
    if not pieces or pieces[-1].finish is not FinishReason.STOP_SEQUENCE:
        return [piece.token.token_id for piece in pieces]
    length = sum(len(piece.text) for piece in pieces)
    decoder = IncrementalDecoder()
    token_ids: list[int] = []
    for piece in pieces:
        if length == 0:
            break
        length -= 0 if piece.token.special else len(decoder.push(piece.token.piece))
        if length < 0:
            break
        token_ids.append(piece.token.token_id)
    return token_ids


def _said(collected: Collected, *, ended: bool) -> Said:
    """Return what is not sent yet. Calls are sent whole, at the end: Ollama's clients read arguments as an object.

    A call that was cut off is no object, and is shown as text.
    """
    thinking, text = collected.take()
    if not ended:
        return Said(thinking=thinking, text=text)
    calls = [(call, object_of(call.arguments)) for call in collected.calls]
    text += "".join(call.text for call, arguments in calls if arguments is None)
    return Said(
        thinking=thinking,
        text=text,
        calls=[
            ollama.OllamaToolCall(function=ollama.OllamaCalledFunction(name=call.name, arguments=arguments))
            for call, arguments in calls
            if arguments is not None
        ],
    )


def generate_reply(model: str, said: Said) -> OllamaReply:
    """Shape a reply of ``/api/generate``."""
    return ollama.OllamaGenerateReply(
        model=model, created_at=_now(), response=said.text, done=False, thinking=said.thinking or None
    )


def chat_reply(model: str, said: Said) -> OllamaReply:
    """Shape a reply of ``/api/chat``."""
    message = ollama.OllamaReplyMessage("assistant", said.text, list(said.calls) or None, said.thinking or None)
    return ollama.OllamaChatReply(model=model, created_at=_now(), message=message, done=False)


def _now() -> str:
    return time_text(datetime.now(UTC))


def time_text(time: datetime) -> str:
    """Return a time of the zone UTC as Ollama's clients read it."""
    return time.isoformat().replace("+00:00", "Z")
