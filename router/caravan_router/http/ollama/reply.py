"""Replies of Ollama's routes: lines of JSON, or one whole object."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from caravan_router.chat.thought_reader import ThoughtPart
from caravan_router.chat.tool_parser import CallPart, TextPart
from caravan_router.core.sampling import FinishReason
from caravan_router.http.generation.answer import Reply
from caravan_router.http.generation.context import Context
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, read_all
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.errors import OLLAMA
from caravan_router.http.ollama.validation import bare_name
from caravan_router.http.openai.chat.output import ChatOutput, Part
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.server.event_stream import LINES, EventStream
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import IncrementalDecoder

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


class AnswerReply(Reply):
    """The reply to one prompt or conversation, in the form of ``shape``."""

    dialect = OLLAMA
    framing = LINES
    _chat: ValidChat

    def __init__(self, body: ollama.OllamaFields, read: Callable[[Context], ChatSource], shape: Shape) -> None:
        """``read``: turns the body into a chat request; raises ValidationError."""
        self._read = read
        self.model = bare_name(body.model)
        self._shape = shape
        # The output so far, for a reply with a context.
        self._pieces: list[Piece] | None = None
        if isinstance(body, ollama.OllamaGenerateRequest) and not body.raw:
            self._pieces = []
        if isinstance(body, ollama.OllamaChatRequest):
            self.operation = "chat"
        self.streamed = body.stream is not False

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        self._chat = await validate_chat(context, self._read(context), 1)
        return (self._chat.request,)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [run] = runs
        output = self._chat.output()
        unsent = _Unsent()

        def take(pieces: Sequence[Piece]) -> None:
            self._take(pieces, output, unsent, run)

        await read_all(runs, [take])
        if output.finish is None:
            # The deadline passed between two pieces.
            unsent.add(output.push((), run.finish))
        reply = self._shape(self._chat.model, unsent.take(ended=True))
        self._finish(reply, output, run)
        return _ENCODER.encode(reply)

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        output = self._chat.output()
        unsent = _Unsent()
        model = self._chat.model
        async for ready in run:
            messages = []
            for pieces in ready:
                self._take(pieces, output, unsent, run)
                said = unsent.take(ended=output.finish is not None)
                if said != NOTHING:
                    messages.append(_ENCODER.encode(self._shape(model, said)))
            await events.send(*messages)
        last = self._shape(model, NOTHING)
        self._finish(last, output, run)
        await events.send(_ENCODER.encode(last))

    def _take(self, pieces: Sequence[Piece], output: ChatOutput, unsent: "_Unsent", run: Run) -> None:
        if self._pieces is not None:
            self._pieces += pieces
        unsent.add(output.push(pieces, run.finish))
        if not output.wanted:
            run.end()

    def _finish(self, reply: OllamaReply, output: ChatOutput, run: Run) -> None:
        timings, times = run.timings(), run.times
        prompt_s = 0.0 if times.started is None or times.first_token is None else times.first_token - times.started
        reply.done = True
        reply.done_reason = "length" if output.finish == "length" else "stop"
        reply.total_duration = int(timings.total_s * NANOSECONDS)
        reply.load_duration = 0
        reply.prompt_eval_count = len(self._chat.request.prompt)
        reply.prompt_eval_duration = int(prompt_s * NANOSECONDS)
        reply.eval_count = run.tokens
        reply.eval_duration = int(max(0.0, timings.inference_s - prompt_s) * NANOSECONDS)
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


class _Unsent:
    """Output that is not sent yet. Calls are sent whole: Ollama's clients read arguments as an object."""

    __slots__ = ("_arguments", "_names", "_text", "_thoughts")

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._text: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            match part:
                case ThoughtPart():
                    self._thoughts.append(part.text)
                case TextPart():
                    self._text.append(part.text)
                case CallPart():
                    if part.name is not None:
                        self._names.append(part.name)
                        self._arguments.append([])
                    self._arguments[-1].append(part.arguments)

    def take(self, *, ended: bool) -> Said:
        """Return what is not sent yet, the calls once the output has ended."""
        thinking, text = "".join(self._thoughts), "".join(self._text)
        self._thoughts.clear()
        self._text.clear()
        return Said(thinking=thinking, text=text, calls=self._take_calls(ended=ended))

    def _take_calls(self, *, ended: bool) -> Sequence[ollama.OllamaToolCall]:
        """Return all calls once the output has ended. A call that was cut off is no JSON object and is left out."""
        if not ended or not self._names:
            return ()
        calls = []
        for name, arguments in zip(self._names, self._arguments, strict=True):
            try:
                decoded = msgspec.json.decode("".join(arguments), type=dict[str, object])
            except (msgspec.DecodeError, RecursionError):
                continue
            calls.append(ollama.OllamaToolCall(function=ollama.OllamaCalledFunction(name=name, arguments=decoded)))
        self._names.clear()
        self._arguments.clear()
        return calls


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
