"""The outputs of chat choices, read from their pieces as they come."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from caravan_router.chat.thought_reader import ThoughtPart, ThoughtReader
from caravan_router.chat.tool_parser import CallPart, TextPart, ToolParser
from caravan_router.core.sampling import FinishReason
from caravan_router.http.generation.run import Run
from caravan_router.http.openai.chat.schema import (
    CalledFunction,
    ChatLogprobs,
    Delta,
    FunctionDelta,
    ReplyMessage,
    ReplyToolCall,
    TokenAlternative,
    TokenLogprob,
    ToolCallDelta,
)
from caravan_router.http.openai.events import FINISH_WORDS
from caravan_router.text.assembler import Piece, TextOptions
from caravan_router.text.detokenize import display_text
from caravan_router.text.stops import StopCutter

NO_OPTIONS = TextOptions()

Part = ThoughtPart | TextPart | CallPart


class ChatOutput:
    """The output of one choice: thoughts, text and tool calls. ``wanted`` turns false when it needs no more tokens.

    ``reader`` splits off the thoughts; None if there are none. The stop strings of ``text`` are looked for in the
    answer only. ``parser`` finds tool calls in the answer; None if there is nothing to call.
    """

    __slots__ = ("_markers", "_min_tokens", "_parser", "_reader", "_started", "_stops", "_tokens", "finish", "wanted")

    def __init__(
        self, parser: ToolParser | None, reader: ThoughtReader | None = None, text: TextOptions = NO_OPTIONS
    ) -> None:
        self._parser = parser
        self._reader = reader
        self._stops = StopCutter(text.stops, keep_stop=text.keep_stop) if text.stops else None
        self._min_tokens = text.min_tokens
        self._tokens = 0
        self._markers = frozenset() if parser is None else parser.markers
        if reader is not None:
            self._markers |= reader.markers
        self._started = False
        self.wanted = True
        # OpenAI's finish reason, once the choice has ended.
        self.finish: str | None = None

    @property
    def thought_tokens(self) -> int:
        """Tokens of the thoughts so far, without their markers."""
        return 0 if self._reader is None else self._reader.tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, if this output looked for it."""
        return None if self._stops is None else self._stops.found

    def push(self, pieces: Sequence[Piece], finish: FinishReason | None) -> list[Part]:
        """Read the next pieces; with ``finish``, the last ones."""
        if self._parser is None and self._reader is None and self._stops is None:
            parts: list[Part] = [TextPart(text)] if (text := "".join([piece.text for piece in pieces])) else []
        else:
            parts = self._read(pieces, ended=finish is not None)
            if not self.wanted:
                finish = FinishReason.STOP_SEQUENCE
        if finish is not None:
            self.finish = FINISH_WORDS[finish]
            if self._parser is not None and self._parser.calls and finish is not FinishReason.LENGTH:
                self.finish = "tool_calls"
        return parts

    def _read(self, pieces: Sequence[Piece], *, ended: bool) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if not self.wanted:
                break
            self._tokens += 1
            text = piece.text
            if piece.token.special and (shown := display_text(piece.token.piece)) in self._markers:
                # In some vocabularies the marker of a thought or a call is a control token, or begins with one.
                text = shown
            if self._reader is None:
                parts += self._read_answer(text)
            else:
                parts += self._read_parts(self._reader.feed(text))
        if ended and self.wanted:
            if self._reader is not None:
                parts += self._read_parts(self._reader.finish())
            if self._stops is not None:
                parts += self._parsed(self._stops.flush())
        if (ended or not self.wanted) and self._parser is not None:
            parts += self._parser.finish()
        return parts

    def _read_parts(self, read: Sequence[ThoughtPart | TextPart]) -> list[Part]:
        parts: list[Part] = []
        for part in read:
            if isinstance(part, ThoughtPart):
                parts.append(part)
            elif self.wanted:
                parts += self._read_answer(part.text)
        return parts

    def _read_answer(self, text: str) -> list[Part]:
        if self._stops is None:
            return self._parsed(text)
        text = self._stops.feed(text, ignore_matches=self._tokens <= self._min_tokens)
        parts = self._parsed(text)
        self.wanted = self.wanted and self._stops.found is None
        return parts

    def _parsed(self, text: str) -> list[Part]:
        if self._parser is None:
            return [TextPart(text)] if text else []
        parts: list[Part] = [*self._parser.feed(text)]
        self.wanted = not self._parser.done
        return parts

    def delta(self, parts: Sequence[Part], *, always: bool) -> Delta | None:
        """Return the next delta. None if there is nothing to send yet: an incomplete character or call.

        ``always``: return an empty delta instead of None.
        """
        if not parts and self.finish is None and not always:
            return None
        delta = Delta()
        if not self._started:
            self._started = True
            delta.role = "assistant"
        if thought := "".join(part.text for part in parts if isinstance(part, ThoughtPart)):
            delta.reasoning_content = thought
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


def new_call_id() -> str:
    """Return a random call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class WholeOutput:
    """The output of a choice that is sent in one piece."""

    output: ChatOutput
    run: Run
    pieces: list[Piece] = field(default_factory=list)
    _thoughts: list[str] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _calls: list[ReplyToolCall] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    @property
    def finish(self) -> str:
        """OpenAI's finish reason of an output that has ended."""
        assert self.output.finish is not None
        return self.output.finish

    def push(self, pieces: Sequence[Piece]) -> None:
        """Read the next pieces, and end the run when the output needs no more."""
        self.pieces.extend(pieces)
        self._take(self.output.push(pieces, self.run.finish))
        if not self.output.wanted:
            self.run.end()

    def end(self) -> None:
        """Complete an output whose run ended without a last piece: its deadline passed between two pieces."""
        if self.output.finish is None:
            self._take(self.output.push((), self.run.finish))

    def _take(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case ThoughtPart():
                    self._thoughts.append(part.text)
                case TextPart():
                    self._text.append(part.text)
                case CallPart():
                    if part.name is not None:
                        self._calls.append(ReplyToolCall(new_call_id(), "function", CalledFunction(part.name, "")))
                        self._arguments.append([])
                    self._arguments[part.index].append(part.arguments)

    def message(self) -> ReplyMessage:
        """Return the message of an output that has ended."""
        message = ReplyMessage("assistant", "".join(self._text))
        if self._thoughts:
            message.reasoning_content = "".join(self._thoughts)
        if self._calls:
            for call, arguments in zip(self._calls, self._arguments, strict=True):
                call.function.arguments = "".join(arguments)
            message.content = message.content or None
            message.tool_calls = self._calls
        return message


def chat_logprobs(pieces: Sequence[Piece]) -> ChatLogprobs:
    """Return one entry per token, control tokens included."""
    return ChatLogprobs([_token_logprob(piece) for piece in pieces])


def _token_logprob(piece: Piece) -> TokenLogprob:
    token = piece.token
    return TokenLogprob(
        token=display_text(token.piece),
        logprob=token.logprob,
        bytes=list(token.piece),
        top_logprobs=[
            TokenAlternative(display_text(other.piece), other.logprob, list(other.piece))
            for other in token.alternatives
        ],
    )
