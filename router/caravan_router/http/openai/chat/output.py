"""The outputs of chat choices, read from their pieces as they come."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from caravan_router.chat.tool_parser import Part, TextPart, ToolParser
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
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text


class ChatOutput:
    """The output of one choice: text and tool calls. ``wanted`` turns false when it needs no more tokens."""

    __slots__ = ("_parser", "_started", "finish", "wanted")

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._started = False
        self.wanted = True
        # OpenAI's finish reason, once the choice has ended.
        self.finish: str | None = None

    def push(self, pieces: Sequence[Piece], finish: FinishReason | None) -> list[Part]:
        """Read the next pieces; with ``finish``, the last ones."""
        if self._parser is None:
            parts: list[Part] = [TextPart(text)] if (text := "".join([piece.text for piece in pieces])) else []
        else:
            parts = self._parsed(self._parser, pieces, ended=finish is not None)
            self.wanted = not self._parser.done
            if not self.wanted:
                finish = FinishReason.STOP_SEQUENCE
        if finish is not None:
            self.finish = FINISH_WORDS[finish]
            if self._parser is not None and self._parser.calls and finish is not FinishReason.LENGTH:
                self.finish = "tool_calls"
        return parts

    @staticmethod
    def _parsed(parser: ToolParser, pieces: Sequence[Piece], *, ended: bool) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            text = piece.text
            if piece.token.special and (shown := display_text(piece.token.piece)) in parser.markers:
                # In some vocabularies the marker of a call is a control token.
                text = shown
            parts += parser.feed(text)
        return parts + parser.finish() if ended else parts

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
        if isinstance(part, TextPart):
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
            if isinstance(part, TextPart):
                self._text.append(part.text)
                continue
            if part.name is not None:
                self._calls.append(ReplyToolCall(new_call_id(), "function", CalledFunction(part.name, "")))
                self._arguments.append([])
            self._arguments[part.index].append(part.arguments)

    def message(self) -> ReplyMessage:
        """Return the message of an output that has ended."""
        text = "".join(self._text)
        if not self._calls:
            return ReplyMessage("assistant", text)
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.function.arguments = "".join(arguments)
        return ReplyMessage("assistant", text or None, self._calls)


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
