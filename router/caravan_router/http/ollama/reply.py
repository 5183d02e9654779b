"""Replies of Ollama's generating routes: lines of JSON, or one whole object."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from caravan_router.chat.tool_parser import Part, TextPart
from caravan_router.http.generation.answer import Context, Reply
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.run import Run, read_all
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.errors import OLLAMA
from caravan_router.http.openai.chat.output import ChatOutput
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.server.event_stream import LINES, EventStream
from caravan_router.text.assembler import Piece

NANOSECONDS = 1_000_000_000

_ENCODER = msgspec.json.Encoder()

OllamaReply = ollama.OllamaGenerateReply | ollama.OllamaChatReply
# Makes a reply, or one line of it, from the model's name, a text and tool calls.
Shape = Callable[[str, str, Sequence[ollama.OllamaToolCall]], OllamaReply]


class AnswerReply(Reply):
    """The reply to one prompt or conversation, in the form of ``shape``."""

    dialect = OLLAMA
    framing = LINES
    _chat: ValidChat

    def __init__(self, body: ollama.OllamaFields, read: Callable[[Context], ChatSource], shape: Shape) -> None:
        """``read``: turns the body into a chat request; raises ValidationError."""
        self._read = read
        self._shape = shape
        self.streamed = body.stream is not False

    async def validate(self, context: Context) -> Sequence[ValidRequest]:
        self._chat = await validate_chat(context, self._read(context), 1)
        return (self._chat.request,)

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [run] = runs
        output = ChatOutput(self._chat.plan.parser())
        unsent = _Unsent()

        def take(pieces: Sequence[Piece]) -> None:
            unsent.add(output.push(pieces, run.finish))
            if not output.wanted:
                run.end()

        await read_all(runs, [take])
        if output.finish is None:
            # The deadline passed between two pieces.
            unsent.add(output.push((), run.finish))
        reply = self._shape(self._chat.model, unsent.take_text(), unsent.take_calls(ended=True))
        self._finish(reply, output, run)
        return _ENCODER.encode(reply)

    async def send(self, events: EventStream, index: int, run: Run) -> None:
        output = ChatOutput(self._chat.plan.parser())
        unsent = _Unsent()
        model = self._chat.model
        async for pieces in run:
            unsent.add(output.push(pieces, run.finish))
            if not output.wanted:
                run.end()
            text, calls = unsent.take_text(), unsent.take_calls(ended=output.finish is not None)
            if text or calls:
                await events.send(_ENCODER.encode(self._shape(model, text, calls)))
        last = self._shape(model, "", ())
        self._finish(last, output, run)
        await events.send(_ENCODER.encode(last))

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


class _Unsent:
    """Output that is not sent yet. Calls are sent whole: Ollama's clients read arguments as an object."""

    __slots__ = ("_arguments", "_names", "_text")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if isinstance(part, TextPart):
                self._text.append(part.text)
                continue
            if part.name is not None:
                self._names.append(part.name)
                self._arguments.append([])
            self._arguments[-1].append(part.arguments)

    def take_text(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text

    def take_calls(self, *, ended: bool) -> list[ollama.OllamaToolCall]:
        """Return all calls once the output has ended. A call that was cut off is no JSON object and is left out."""
        if not ended or not self._names:
            return []
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


def generate_reply(model: str, text: str, _calls: Sequence[ollama.OllamaToolCall]) -> OllamaReply:
    """Shape a reply of ``/api/generate``."""
    return ollama.OllamaGenerateReply(model=model, created_at=_now(), response=text, done=False)


def chat_reply(model: str, text: str, calls: Sequence[ollama.OllamaToolCall]) -> OllamaReply:
    """Shape a reply of ``/api/chat``."""
    message = ollama.OllamaReplyMessage("assistant", text, list(calls) or None)
    return ollama.OllamaChatReply(model=model, created_at=_now(), message=message, done=False)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
