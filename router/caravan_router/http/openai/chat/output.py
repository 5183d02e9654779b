"""What a chat's choice is made of, as its tokens come."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from caravan_router.chat.tool_parser import Part, TextPart, ToolParser
from caravan_router.core.sampling import FinishReason
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
from caravan_router.http.openai.completions.choice import FINISH_WORDS
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text


class ChatOutput:
    """One choice. ``wanted`` turns false when no more of its tokens are needed."""

    __slots__ = ("_begun", "_parser", "finish", "wanted")

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser
        self._begun = False
        self.wanted = True
        # Once it has ended: why, in OpenAI's words.
        self.finish: str | None = None

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        """What the pieces say; the last of them may say that it has ended."""
        finish = pieces[-1].finish
        if self._parser is None:
            parts: list[Part] = [TextPart(text)] if (text := "".join([piece.text for piece in pieces])) else []
        else:
            parts = self._parsed(self._parser, pieces)
            self.wanted = not self._parser.done
            if not self.wanted:
                finish = FinishReason.STOP_SEQUENCE
        if finish is not None:
            self.finish = FINISH_WORDS[finish]
            if self._parser is not None and self._parser.calls and finish is not FinishReason.LENGTH:
                self.finish = "tool_calls"
        return parts

    @staticmethod
    def _parsed(parser: ToolParser, pieces: Sequence[Piece]) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            text = piece.text
            if piece.token.special and (shown := display_text(piece.token.piece)) in parser.markers:
                # In some vocabularies what begins a call is a control token.
                text = shown
            parts += parser.feed(text)
        return parts + parser.finish() if pieces[-1].finish is not None else parts

    def delta(self, parts: Sequence[Part], *, always: bool) -> Delta | None:
        """None where there is nothing to show, unless ``always``: half a character, or what may begin a call."""
        if not parts and self.finish is None and not always:
            return None
        delta = Delta()
        if not self._begun:
            self._begun = True
            delta.role = "assistant"
        if text := "".join(part.text for part in parts if isinstance(part, TextPart)):
            delta.content = text
        elif delta.role is not msgspec.UNSET and not parts:
            # Nothing at all was said: an empty text, as OpenAI has it.
            delta.content = ""
        if calls := _call_deltas(parts):
            delta.tool_calls = calls
        return delta


def _call_deltas(parts: Sequence[Part]) -> list[ToolCallDelta]:
    """One for each call: some clients take a chunk's entries for different calls."""
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
    """As OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(slots=True)
class WholeOutput:
    """A choice that is sent in one piece."""

    output: ChatOutput
    pieces: list[Piece] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)
    _calls: list[ReplyToolCall] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    def push(self, pieces: Sequence[Piece]) -> None:
        self.pieces.extend(pieces)
        for part in self.output.push(pieces):
            if isinstance(part, TextPart):
                self._text.append(part.text)
                continue
            if part.name is not None:
                self._calls.append(ReplyToolCall(new_call_id(), "function", CalledFunction(part.name, "")))
                self._arguments.append([])
            self._arguments[part.index].append(part.arguments)

    def message(self) -> ReplyMessage:
        """When it has ended."""
        text = "".join(self._text)
        if not self._calls:
            return ReplyMessage("assistant", text)
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.function.arguments = "".join(arguments)
        return ReplyMessage("assistant", text or None, self._calls)


def chat_logprobs(pieces: Sequence[Piece]) -> ChatLogprobs:
    """One entry a token; those of control tokens too."""
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
