"""The outputs of chat choices, read as they come or collected until sent whole, for the replies of every dialect."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from caravan_dialects.api.generation.run import Run, read_all
from caravan_dialects.api.openai.chat.schema import (
    CalledFunction,
    ChatLogprobs,
    ReplyMessage,
    ReplyToolCall,
    TokenAlternative,
    TokenLogprob,
)
from caravan_dialects.api.openai.events import FINISH_WORDS, new_call_id
from caravan_dialects.chat.thought_reader import ThoughtCalls, ThoughtPart, ThoughtReader
from caravan_dialects.chat.tool_format import CONTROL
from caravan_dialects.chat.tool_parser import CallPart, TextPart, ToolParser
from caravan_dialects.text.assembler import Piece, TextOptions
from caravan_dialects.text.detokenize import display_text
from caravan_dialects.text.stops import StopCutter
from caravan_proto.messages.results import FinishReason

NO_OPTIONS = TextOptions()

Part = ThoughtPart | TextPart | CallPart
# Takes pieces, and the parts that they complete.
Taker = Callable[[Sequence[Piece], Sequence[Part]], None]


class ChatOutput:
    """The output of one choice: thoughts, text and tool calls. It ends its ``run`` when it needs no more tokens.

    ``reader`` splits off the thoughts; None if there are none. The stop strings of ``text`` are looked for in the
    answer only. ``parser`` finds tool calls in the answer, and ``thought_calls`` in thoughts; None if there is
    nothing to call.
    """

    __slots__ = (
        "_answered",
        "_called",
        "_markers",
        "_min_tokens",
        "_parser",
        "_reader",
        "_stops",
        "_thought_calls",
        "_thought_markers",
        "_tokens",
        "_wanted",
        "finish",
        "hides_thoughts",
        "run",
    )

    def __init__(
        self,
        run: Run,
        parser: ToolParser | None,
        reader: ThoughtReader | None = None,
        text: TextOptions = NO_OPTIONS,
        *,
        thought_calls: ThoughtCalls | None = None,
    ) -> None:
        self.run = run
        # Whether thoughts are read and left out.
        self.hides_thoughts = False
        self._thought_calls = thought_calls
        # Whether there is an answer, and whether a thought ended with calls.
        self._answered = self._called = False
        self._parser = parser
        self._reader = reader
        self._stops = StopCutter(text.stops, keep_stop=text.keep_stop) if text.stops else None
        self._min_tokens = text.min_tokens
        self._tokens = 0
        # Texts of control tokens that are looked for; in others they are hidden.
        self._markers = frozenset() if parser is None else parser.markers
        self._thought_markers = frozenset() if reader is None else reader.markers
        # False when the output needs no more tokens.
        self._wanted = True
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

    def push(self, pieces: Sequence[Piece]) -> list[Part]:
        """Read the next pieces; the last ones if the run has ended."""
        finish = self.run.finish
        if self._parser is None and self._reader is None and self._stops is None:
            parts: list[Part] = [TextPart(text)] if (text := "".join([piece.text for piece in pieces])) else []
        else:
            cut = finish is FinishReason.LENGTH
            parts = [_shown(part) for part in self._read(pieces, ended=finish is not None, cut=cut)]
            if self.hides_thoughts:
                parts = [part for part in parts if not isinstance(part, ThoughtPart)]
            if not self._wanted:
                finish = FinishReason.STOP_SEQUENCE
                self.run.end()
        if finish is not None:
            self.finish = FINISH_WORDS[finish]
            called = self._called or (self._parser is not None and self._parser.calls > 0)
            if called and finish is not FinishReason.LENGTH:
                self.finish = "tool_calls"
                self.run.call_tools()
        return parts

    def end(self) -> list[Part]:
        """End an output that has no last piece: its deadline passed between two pieces, or nobody reads on."""
        if self.finish is not None:
            return []
        self.run.end()
        return self.push(())

    def _read(self, pieces: Sequence[Piece], *, ended: bool, cut: bool) -> list[Part]:
        parts: list[Part] = []
        for piece in pieces:
            if not self._wanted:
                break
            self._tokens += 1
            text = piece.text
            if piece.token.special:
                text = self._marker(display_text(piece.token.piece)) or text
            if self._reader is None:
                parts += self._read_answer(text)
            else:
                parts += self._read_parts(self._reader.feed(text))
        if ended and self._wanted:
            if self._reader is not None:
                parts += self._read_parts(self._reader.finish())
            if self._stops is not None:
                parts += self._parsed(self._stops.flush())
        if (ended or not self._wanted) and self._parser is not None:
            parts += self._parser.finish(cut=cut)
        if ended and self._thought_calls is not None and not self._answered:
            rest, calls = self._thought_calls.finish()
            parts += [ThoughtPart(rest)] if rest else []
            parts += calls
            self._called = bool(calls)
        return parts

    def _marker(self, shown: str) -> str:
        """Return what the readers are to see of a control token; "" for nothing.

        In some vocabularies the marker of a thought or a call is a control token, or begins with one.
        """
        if shown in self._thought_markers:
            return shown
        # As text, it opens no call then: a model may copy that from a message.
        return next((marker for marker in (CONTROL + shown, shown) if marker in self._markers), "")

    def _read_parts(self, read: Sequence[ThoughtPart | TextPart]) -> list[Part]:
        parts: list[Part] = []
        for part in read:
            if isinstance(part, ThoughtPart):
                text = part.text if self._thought_calls is None else self._thought_calls.feed(part.text)
                parts += [ThoughtPart(text)] if text else []
            elif self._wanted:
                if self._thought_calls is not None and part.text.strip():
                    self._answered = True
                    parts += [ThoughtPart(held)] if (held := self._thought_calls.drop()) else []
                parts += self._read_answer(part.text)
        return parts

    def _read_answer(self, text: str) -> list[Part]:
        if self._stops is None:
            return self._parsed(text)
        text = self._stops.feed(text, ignore_matches=self._tokens <= self._min_tokens)
        parts = self._parsed(text)
        self._wanted = self._wanted and self._stops.found is None
        return parts

    def _parsed(self, text: str) -> list[Part]:
        if self._parser is None:
            return [TextPart(text)] if text else []
        parts: list[Part] = [*self._parser.feed(text)]
        self._wanted = not self._parser.done
        return parts


def _shown(part: Part) -> Part:
    """Take the marks of control tokens out of ``part``."""
    if isinstance(part, CallPart):
        part.arguments = part.arguments.replace(CONTROL, "")
    else:
        part.text = part.text.replace(CONTROL, "")
    return part


async def read_outputs(outputs: Sequence[ChatOutput], takers: Sequence[Taker]) -> None:
    """Read every output to its end, for the taker at the same index. Raises what `read_all` raises."""

    def reading(output: ChatOutput, take: Taker) -> Callable[[Sequence[Piece]], None]:
        return lambda pieces: take(pieces, output.push(pieces))

    await read_all([output.run for output in outputs], list(map(reading, outputs, takers)))
    for output, take in zip(outputs, takers, strict=True):
        take((), output.end())


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments``: JSON, unless the output was cut off."""

    name: str
    arguments: str

    @property
    def text(self) -> str:
        """What a reply shows of a call that was cut off, if its dialect has objects only."""
        return f'{{"name": "{self.name}", "arguments": {self.arguments}'


class Collected:
    """Collects thoughts and text until they are taken, and all calls."""

    __slots__ = ("_arguments", "_names", "_text", "_thoughts")

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._text: list[str] = []
        # Of each call, and the fragments of the arguments of each.
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    @property
    def calls(self) -> list[Call]:
        """All calls so far."""
        return [Call(name, "".join(fragments)) for name, fragments in zip(self._names, self._arguments, strict=True)]

    def add(self, parts: Iterable[Part]) -> None:
        """Add the next parts of the output."""
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
                    self._arguments[part.index].append(part.arguments)
                case _:
                    assert_never(part)

    def take(self) -> tuple[str, str]:
        """Return the thoughts and the text since the last call."""
        taken = "".join(self._thoughts), "".join(self._text)
        self._thoughts.clear()
        self._text.clear()
        return taken


@dataclass(slots=True)
class WholeOutput:
    """The output of a choice that is sent in one piece."""

    output: ChatOutput
    pieces: list[Piece] = field(default_factory=list)
    collected: Collected = field(default_factory=Collected)

    @property
    def finish(self) -> str:
        """OpenAI's finish reason of an output that has ended."""
        assert self.output.finish is not None
        return self.output.finish

    def take(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
        """Add the next pieces, and the parts that they complete."""
        self.pieces.extend(pieces)
        self.collected.add(parts)

    def message(self) -> ReplyMessage:
        """Return the message of an output that has ended. Call it once."""
        thought, text = self.collected.take()
        message = ReplyMessage("assistant", text)
        if thought:
            message.reasoning_content = message.reasoning = thought
        if calls := self.collected.calls:
            message.content = text or None
            message.tool_calls = [
                ReplyToolCall(new_call_id(), "function", CalledFunction(call.name, call.arguments)) for call in calls
            ]
        return message


async def read_whole(outputs: Sequence[ChatOutput]) -> list[WholeOutput]:
    """Read every output to its end. Raises EngineError."""
    wholes = [WholeOutput(output) for output in outputs]
    await read_outputs(outputs, [whole.take for whole in wholes])
    return wholes


def chat_logprobs(pieces: Sequence[Piece]) -> ChatLogprobs:
    """Return one entry per token, control tokens included."""
    return ChatLogprobs([token_logprob(piece) for piece in pieces])


def token_logprob(piece: Piece) -> TokenLogprob:
    """Return the entry of one token."""
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
