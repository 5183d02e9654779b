"""Ollama's routes, for the desktop tools that speak them: lines of JSON, streamed unless told otherwise."""

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from caravan_router.chat.tool_parser import Part, TextPart
from caravan_router.core.errors import EngineError
from caravan_router.http.generation.bounds import bounds_of, model_of
from caravan_router.http.generation.headers import compute_headers, timing_headers
from caravan_router.http.generation.permits import admitted, validating
from caravan_router.http.generation.run import Run
from caravan_router.http.generation.runs import started
from caravan_router.http.generation.serving import serving_of
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.ollama.validation import source_of_chat, source_of_generate
from caravan_router.http.openai.chat.output import ChatOutput
from caravan_router.http.openai.chat.validation import ChatSource, ValidChat, validate_chat
from caravan_router.http.server.body import read_body
from caravan_router.http.server.errors import tgi_body
from caravan_router.http.server.event_stream import LINES, EventStream, one_line
from caravan_router.http.server.state import CLIENT, STATE, AppState

_GENERATE = msgspec.json.Decoder(ollama.OllamaGenerateRequest)
_CHAT = msgspec.json.Decoder(ollama.OllamaChatRequest)
_SHOW = msgspec.json.Decoder(ollama.OllamaShowRequest)
_ENCODER = msgspec.json.Encoder()

_NANOSECONDS = 1_000_000_000

Reply = ollama.OllamaGenerateReply | ollama.OllamaChatReply
# Makes a reply, or one line of it, of a model's name and what it says.
Shape = Callable[[str, str, Sequence[ollama.OllamaToolCall]], Reply]


async def ollama_generate(request: web.Request) -> web.StreamResponse:
    """A text for a prompt; a line for each part of it unless ``stream`` is false."""
    body = await read_body(request, _GENERATE)
    if not body.prompt:
        return _loaded(request, body, _generate_reply)
    return await _answer(request, body, source_of_generate(body, _context(request)), _generate_reply)


async def ollama_chat(request: web.Request) -> web.StreamResponse:
    """An answer to a conversation; a line for each part of it unless ``stream`` is false."""
    body = await read_body(request, _CHAT)
    if not body.messages:
        return _loaded(request, body, _chat_reply)
    return await _answer(request, body, source_of_chat(body, _context(request)), _chat_reply)


def _context(request: web.Request) -> int:
    state = request.app[STATE]
    return bounds_of(state.limits, model_of(state.engine)).max_total_tokens


async def _answer(
    request: web.Request, body: ollama.OllamaFields, source: ChatSource, shape: Shape
) -> web.StreamResponse:
    arrived = time.monotonic()
    state, client = request.app[STATE], request[CLIENT]
    with admitted(state, client, 1):
        with validating(state.metrics, 1):
            serving = serving_of(source.request, request.headers, client.key, state.limits)
            chat = await validate_chat(state, source, serving, 1)
        if body.stream is not False:
            return await _stream(request, chat, arrived, shape)
        with started(state, [chat.request], arrived) as runs:
            return await _whole(state, chat, runs[0], shape)


async def _whole(state: AppState, chat: ValidChat, run: Run, shape: Shape) -> web.Response:
    output = ChatOutput(chat.plan.parser())
    speech = _Speech()
    async for pieces in run.pieces:
        speech.add(output.push(pieces))
        if not output.wanted:
            run.pieces.end()
    text = speech.take_text()
    reply = shape(chat.model, text, speech.take_calls(ended=True))
    _finish(reply, chat, output, run)
    return _json(reply, timing_headers(state, [chat.request], [run]))


async def _stream(request: web.Request, chat: ValidChat, arrived: float, shape: Shape) -> web.StreamResponse:
    state = request.app[STATE]
    async with EventStream(request, compute_headers(state, chat.request.characters), state.limits, LINES) as lines:
        try:
            with started(state, [chat.request], arrived) as runs:
                await _send_lines(lines, chat, runs[0], shape)
        except EngineError as error:
            await lines.send(tgi_body(error) + b"\n")
    return lines.response


async def _send_lines(lines: EventStream, chat: ValidChat, run: Run, shape: Shape) -> None:
    output = ChatOutput(chat.plan.parser())
    speech = _Speech()
    async for pieces in run.pieces:
        speech.add(output.push(pieces))
        if not output.wanted:
            run.pieces.end()
        text, calls = speech.take_text(), speech.take_calls(ended=output.finish is not None)
        if text or calls:
            await lines.send(_line(shape(chat.model, text, calls)))
    last = shape(chat.model, "", ())
    _finish(last, chat, output, run)
    await lines.send(_line(last))


def _line(reply: Reply) -> bytes:
    return one_line(_ENCODER.encode(reply)) + b"\n"


class _Speech:
    """What is said and not sent yet. Calls are sent whole: Ollama's clients read arguments as an object."""

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
        """All once the output has ended. What is no JSON object then is passed over: it was cut off."""
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


def _generate_reply(model: str, text: str, _calls: Sequence[ollama.OllamaToolCall]) -> Reply:
    return ollama.OllamaGenerateReply(model=model, created_at=_now(), response=text, done=False)


def _chat_reply(model: str, text: str, calls: Sequence[ollama.OllamaToolCall]) -> Reply:
    message = ollama.OllamaReplyMessage("assistant", text, list(calls) or None)
    return ollama.OllamaChatReply(model=model, created_at=_now(), message=message, done=False)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _finish(reply: Reply, chat: ValidChat, output: ChatOutput, run: Run) -> None:
    timings, times = run.timings(), run.pieces.times
    prompt_s = 0.0 if times.started is None or times.first_token is None else times.first_token - times.started
    reply.done = True
    reply.done_reason = "length" if output.finish == "length" else "stop"
    reply.total_duration = int(timings.total_s * _NANOSECONDS)
    reply.load_duration = 0
    reply.prompt_eval_count = len(chat.request.prompt)
    reply.prompt_eval_duration = int(prompt_s * _NANOSECONDS)
    reply.eval_count = run.tokens
    reply.eval_duration = int(max(0.0, timings.inference_s - prompt_s) * _NANOSECONDS)


def _loaded(request: web.Request, body: ollama.OllamaFields, shape: Shape) -> web.Response:
    """Nothing to answer: the client wants the model loaded, or gone. It is there, and stays."""
    reply = shape(model_of(request.app[STATE].engine).name, "", ())
    reply.done = True
    reply.done_reason = "unload" if body.keep_alive in {0, "0"} else "load"
    return _json(reply)


def _json(value: object, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=_ENCODER.encode(value), headers=headers, content_type="application/json")


async def ollama_tags(request: web.Request) -> web.Response:
    """The one model and its adapters."""
    model = model_of(request.app[STATE].engine)
    tags = [_tag(model.name, model.fingerprint, parent="")]
    tags += [_tag(adapter, model.fingerprint, parent=model.name) for adapter in model.adapters]
    return _json(ollama.OllamaTagList(tags))


def _tag(name: str, digest: str, *, parent: str) -> ollama.OllamaTag:
    return ollama.OllamaTag(name=name, model=name, digest=digest, details=ollama.OllamaDetails(parent_model=parent))


async def ollama_ps(request: web.Request) -> web.Response:
    """What is loaded, which is what there is."""
    return await ollama_tags(request)


async def ollama_show(request: web.Request) -> web.Response:
    """What is known of the model."""
    await read_body(request, _SHOW)
    model = model_of(request.app[STATE].engine)
    capabilities = ["completion", "tools"] if model.chat_template else ["completion"]
    if model.embedding_size:
        capabilities.append("embedding")
    return _json(
        ollama.OllamaShowReply(
            template=model.chat_template,
            details=ollama.OllamaDetails(parent_model=""),
            model_info={
                "general.name": model.name,
                "caravan.context_length": model.max_sequence_tokens,
                "caravan.vocab_size": model.vocabulary_size,
            },
            capabilities=capabilities,
        )
    )


async def ollama_version(request: web.Request) -> web.Response:
    """Caravan's version."""
    return _json(ollama.OllamaVersion(request.app[STATE].info.version))
