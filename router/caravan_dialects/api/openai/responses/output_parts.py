"""The parts in which an output is generated: one, or several with calls to MCP servers between them."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.chat.output import ChatOutput, Part
from caravan_dialects.api.openai.chat.validation import ValidChat
from caravan_dialects.api.openai.events import token_ids_of
from caravan_dialects.api.openai.responses.output import MessageTokens, OutputItems
from caravan_dialects.api.openai.responses.schema import (
    NO_USAGE,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)
from caravan_dialects.api.openai.responses.tool_loop import ToolLoop
from caravan_dialects.api.openai.usage import media_tokens
from caravan_dialects.conversations.nodes import ExactTokens
from caravan_dialects.text.assembler import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``chat``: the first prompt. ``loop``: makes the calls to MCP servers; None if the request names none.

    ``output``: it is generated, and not only the prompt computed. ``logprobs``: messages have them. ``fingerprint``: of
    the model.
    """

    chat: ValidChat
    loop: ToolLoop | None
    output: bool
    logprobs: bool
    fingerprint: str

    @property
    def is_ready(self) -> bool:
        """Whether the first prompt is whole."""
        return self.loop is None or self.loop.is_ready


class OutputParts:
    """The part that is generated now, or was last, and the usage of those before it.

    ``chat``: its prompt. ``output``: None until it is submitted.
    """

    def __init__(self, plan: Plan, items: OutputItems) -> None:
        self._plan = plan
        self._items = items
        self._token_ids: list[int] = []
        self._message_tokens = MessageTokens()
        self.chat = plan.chat
        self.output: ChatOutput | None = None
        # None if there are none.
        self.earlier: ResponseUsage | None = None

    @property
    def generated(self) -> int:
        """Tokens of the parts before this one."""
        return 0 if self.earlier is None else self.earlier.output_tokens

    def begin(self, run: Run) -> ChatOutput:
        """Return the reader of the part that ``run`` generates."""
        self.output = output = self.chat.output(run)
        return output

    def end(self) -> None:
        """Read what has come of the part, which ends."""
        if self.output is not None:
            self.take((), self.output.end())

    def count(self) -> None:
        """Count the part among the earlier ones: the next one has not begun."""
        self.earlier = self.usage()
        self.output = None

    def take_up(self, chat: ValidChat) -> None:
        """Let ``chat`` be the prompt of the next part."""
        self.chat = chat
        self._token_ids = []

    def take(self, pieces: Sequence[Piece], parts: Sequence[Part]) -> None:
        """Add the next pieces of the part, and what they complete."""
        # A step over a prompt ends with a token, which is dropped if none is wanted.
        if self._plan.output:
            self._token_ids += token_ids_of(pieces)
            logprobs = self._message_tokens.of(pieces, parts) if self._plan.logprobs else ()
            self._items.take(parts, logprobs)

    def exact_tokens(self) -> ExactTokens:
        """Return the prompt and the output of the part."""
        token_ids = (*self.chat.request.prompt, *self._token_ids)
        return ExactTokens(fingerprint=self._plan.fingerprint, token_ids=token_ids)

    def cut(self) -> str | None:
        """Return why the part is not whole; None if it is."""
        output = self.output
        if output is None or output.finish != "length" or not self._plan.output:
            return None
        return "max_output_tokens" if output.run.cut is None else "deadline_exceeded"

    def usage(self) -> ResponseUsage:
        """Return the usage of all parts so far, each of which reads its whole prompt."""
        output = self.output
        if output is None:
            return self.earlier or NO_USAGE
        prompt, wanted = len(self.chat.request.prompt), self._plan.output
        generated = output.run.tokens if wanted else 0
        pictures, sounds = media_tokens(output.run.spec)
        now = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(
                output.run.cached_tokens, image_tokens=pictures, audio_tokens=sounds
            ),
            output_tokens=generated,
            output_tokens_details=OutputTokensDetails(output.thought_tokens if wanted else 0),
            total_tokens=prompt + generated,
        )
        return now if self.earlier is None else self.earlier.plus(now)
