"""Replies of ``:generateContent`` and ``:streamGenerateContent``."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

import msgspec

from caravan_dialects.api.body import object_of
from caravan_dialects.api.gemini.errors import GEMINI
from caravan_dialects.api.gemini.schema import (
    GeminiCandidate,
    GenerateContentRequest,
    GenerateContentResponse,
    GenerationConfig,
    LogprobCandidate,
    LogprobsResult,
    ReplyCall,
    ReplyContent,
    ReplyPart,
    TopCandidates,
    UsageMetadata,
)
from caravan_dialects.api.gemini.translation import CONFIG, source_of
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.checks import check_candidates, check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.chat.output import Call, ChatOutput, Part, read_outputs
from caravan_dialects.api.openai.chat.validation import ValidChat, validate_whole_chat
from caravan_dialects.api.openai.choices import Choices
from caravan_dialects.api.openai.events import new_call_id
from caravan_dialects.api.stream import Events, Framing
from caravan_dialects.chat.thought_reader import ThoughtPart
from caravan_dialects.chat.tool_parser import CallPart, TextPart
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import display_text

_ENCODER = msgspec.json.Encoder()
# An error in a stream is no event, but JSON between them: Google's packages look for it there. They read comments as
# such JSON, so that an empty event keeps the connection open.
_EVENTS = Framing("text/event-stream", b"", b"\n\n", keep_alive=b"\n\n")
# One list, whose elements come as they are ready.
_LIST = Framing("application/json", b"", b"", keep_alive=b"\n", end=b"]")
# Makes a message of a stream of a chunk.
Framed = Callable[[bytes], bytes]


class ReplyParts:
    """Makes the parts of one candidate. A call is a part of its own, once it is complete."""

    __slots__ = ("_before", "_fragments", "_name", "_shows_thoughts")

    def __init__(self, *, shows_thoughts: bool) -> None:
        """``shows_thoughts``: whether the reply has parts with thoughts."""
        self._shows_thoughts = shows_thoughts
        # The kind of the last part, and the open call: its name, and the fragments of its arguments.
        self._before: type[Part] | None = None
        self._name: str | None = None
        self._fragments: list[str] = []

    def add(self, parts: Iterable[Part]) -> list[ReplyPart]:
        """Return the parts that are complete with ``parts``. A text is complete at any time."""
        made: list[ReplyPart] = []
        for part in parts:
            match part:
                case CallPart(name=name, arguments=arguments):
                    if name is not None:
                        made += self.end()
                        self._name = name
                    self._fragments.append(arguments)
                case ThoughtPart(text=text) | TextPart(text=text):
                    made += self.end()
                    if self._before not in {None, type(part)}:
                        # After a part of another kind comes a blank line, which parts do not need.
                        text = text.lstrip("\n")
                    thought = isinstance(part, ThoughtPart)
                    if text and not thought:
                        made.append(ReplyPart(text=text))
                    elif text and self._shows_thoughts:
                        made.append(ReplyPart(text=text, thought=True))
                case _:
                    assert_never(part)
            self._before = type(part)
        return made

    def end(self) -> list[ReplyPart]:
        """Return the part of the open call, if there is one."""
        name, self._name = self._name, None
        if name is None:
            return []
        text = "".join(self._fragments)
        self._fragments.clear()
        # A call that was cut off is no object: the reply shows it as text.
        if (args := object_of(text)) is None:
            return [ReplyPart(text=Call(name, text).text)]
        return [ReplyPart(function_call=ReplyCall(id=new_call_id(), name=name, args=args))]


def merged(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    """Return ``parts`` with texts in a row as one part."""
    made: list[ReplyPart] = []
    texts: list[str] = []
    for place, part in enumerate(parts):
        if part.text is msgspec.UNSET:
            made.append(part)
            continue
        texts.append(part.text)
        following = parts[place + 1] if place + 1 < len(parts) else None
        if following is None or following.text is msgspec.UNSET or following.thought is not part.thought:
            made.append(ReplyPart(text="".join(texts), thought=part.thought))
            texts.clear()
    return made


class AskedContent(Asked):
    """The next turn of a conversation: a whole one, or a stream of events."""

    dialect = GEMINI
    framing = _EVENTS
    operation = "chat"

    def __init__(self, model: str, body: GenerateContentRequest, limits: Limits, *, streamed: bool = False) -> None:
        """``model``: the name in the path. Raises ValidationError."""
        self._body = body
        self._config = body.generation_config or GenerationConfig()
        count = self._config.candidate_count
        self.generations = 1 if count is None else count
        check_candidates(f"{CONFIG}.candidateCount", self.generations, limits)
        self.model = model
        self.streamed = streamed

    async def validate(self, context: Context) -> "ContentAnswer":
        check_range(f"{CONFIG}.logprobs", self._config.logprobs, 0, context.bounds.max_top_n_tokens)
        choices = Choices(n=self.generations, candidates=self.generations)
        chat = await validate_whole_chat(context, source_of(self._body, context.model), choices)
        thinking = self._config.thinking_config
        shows = thinking is not None and bool(thinking.include_thoughts)
        return ContentAnswer(chat, self.framed, shows_thoughts=shows)

    def framed(self, chunk: bytes) -> bytes:
        """Return the message of a stream for ``chunk``."""
        return b"data: " + chunk


class AskedList(AskedContent):
    """The next turn as a JSON list of chunks."""

    framing = _LIST

    def __init__(self, model: str, body: GenerateContentRequest, limits: Limits, *, streamed: bool = False) -> None:
        super().__init__(model, body, limits, streamed=streamed)
        # What comes before the next chunk.
        self._before = b"["

    def framed(self, chunk: bytes) -> bytes:
        before, self._before = self._before, b",\r\n"
        return before + chunk

    def error_messages(self, error: Exception) -> Sequence[bytes]:
        return (self.framed(self.dialect.body(error, "")),)


@dataclass(slots=True)
class _Candidate:
    """A candidate that is sent whole."""

    output: ChatOutput
    reading: ReplyParts
    pieces: list[Piece] = field(default_factory=list)
    parts: list[ReplyPart] = field(default_factory=list)

    def take(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
        """Add the next pieces, and the parts that they complete."""
        self.pieces += pieces
        self.parts += self.reading.add(parts)


class ContentAnswer(Answer):
    """The turn: candidates with texts, thoughts and calls."""

    def __init__(self, chat: ValidChat, framed: Framed, *, shows_thoughts: bool) -> None:
        super().__init__((chat.request,))
        self._chat = chat
        self._framed = framed
        self._shows_thoughts = shows_thoughts
        self._id = secrets.token_urlsafe(16)
        # Of each candidate: tokens, those of thoughts, and cached tokens of its prompt.
        self._counts: dict[int, tuple[int, int, int]] = {}

    async def whole(self, runs: Sequence[Run]) -> bytes:
        read = [_Candidate(self._chat.output(run), self._reading()) for run in runs]
        await read_outputs([one.output for one in read], [one.take for one in read])
        candidates = []
        for index, one in enumerate(read):
            self._count(index, one.output)
            candidates.append(
                GeminiCandidate(
                    content=ReplyContent(merged([*one.parts, *one.reading.end()])),
                    finish_reason=_finish_of(one.output),
                    index=index,
                    avg_logprobs=_mean(one.pieces) if self._chat.logprobs else msgspec.UNSET,
                    logprobs_result=self._logprobs(one.pieces),
                )
            )
        return self._encoded(candidates)

    async def send(self, events: Events, index: int, run: Run) -> None:
        output, reading = self._chat.output(run), self._reading()
        async for ready in run:
            messages = []
            for pieces in ready:
                parts = reading.add(output.push(pieces))
                if output.finish is not None:
                    parts += reading.end()
                if parts or output.finish is not None or (pieces and self._chat.logprobs):
                    messages.append(self._chunk(index, output, parts, pieces))
            await events.send(*messages)
        if output.finish is None:
            parts = reading.add(output.end()) + reading.end()
            await events.send(self._chunk(index, output, parts, ()))

    def _reading(self) -> ReplyParts:
        return ReplyParts(shows_thoughts=self._shows_thoughts)

    def _chunk(self, index: int, output: ChatOutput, parts: Sequence[ReplyPart], pieces: Sequence[Piece]) -> bytes:
        """Return the message of a stream for the next parts of a candidate."""
        self._count(index, output)
        candidate = GeminiCandidate(
            # Clients take a content without parts for a broken one.
            content=ReplyContent(merged(parts) or [ReplyPart(text="")]),
            finish_reason=msgspec.UNSET if output.finish is None else _finish_of(output),
            index=index,
            logprobs_result=self._logprobs(pieces),
        )
        return self._framed(self._encoded([candidate]))

    def _encoded(self, candidates: list[GeminiCandidate]) -> bytes:
        return _ENCODER.encode(
            GenerateContentResponse(
                candidates=candidates,
                usage_metadata=self._usage(),
                model_version=self._chat.model,
                response_id=self._id,
            )
        )

    def _count(self, index: int, output: ChatOutput) -> None:
        self._counts[index] = (output.run.tokens, output.thought_tokens, output.run.cached_tokens)

    def _usage(self) -> UsageMetadata:
        prompt, counts = len(self._chat.request.prompt), list(self._counts.values())
        tokens, thoughts = sum(one for one, _, _ in counts), sum(one for _, one, _ in counts)
        return UsageMetadata(
            prompt_token_count=prompt,
            candidates_token_count=tokens - thoughts,
            total_token_count=prompt + tokens,
            cached_content_token_count=max((one for _, _, one in counts), default=0),
            thoughts_token_count=thoughts if self._chat.thinks else msgspec.UNSET,
        )

    def _logprobs(self, pieces: Sequence[Piece]) -> LogprobsResult | msgspec.UnsetType:
        if not self._chat.logprobs:
            return msgspec.UNSET
        tokens = [piece.token for piece in pieces]
        return LogprobsResult(
            [LogprobCandidate(display_text(one.piece), one.token_id, one.logprob) for one in tokens],
            [
                TopCandidates(
                    [LogprobCandidate(display_text(other.piece), other.token_id, other.logprob) for other in each]
                )
                for each in (one.alternatives for one in tokens)
            ],
        )


def _finish_of(output: ChatOutput) -> str:
    return "MAX_TOKENS" if output.finish == "length" else "STOP"


def _mean(pieces: Sequence[Piece]) -> float | msgspec.UnsetType:
    known = [piece.token.logprob for piece in pieces if piece.token.logprob is not None]
    return sum(known) / len(known) if known else msgspec.UNSET
