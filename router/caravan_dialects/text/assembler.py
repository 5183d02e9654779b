"""Turns tokens into pieces of text that can be sent, and ends the text at a stop string."""

from collections import deque
from dataclasses import dataclass

from caravan_dialects.text.detokenize import IncrementalDecoder
from caravan_dialects.text.stops import StopMatcher
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.tokens import GeneratedToken


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the tokens of one generation become text. The rules are vLLM's; its field names are in brackets.

    ``stops``: the text ends before the first of these strings to be completed [``stop``].
    ``keep_stop``: the text ends after that string [``include_stop_str_in_output``].
    ``special_text``: the text of control tokens is part of the text, and stop strings can match in it [the opposite of
    ``skip_special_tokens``].
    ``min_tokens``: a stop string that is complete within the first ``min_tokens`` tokens does not count [same name].
    """

    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    special_text: bool = False
    min_tokens: int = 0


@dataclass(slots=True)
class Piece:
    """A token and the text it adds, which is "" for a hidden control token and inside a stop string that is cut off.

    ``finish`` is set on the last piece only. The texts of all pieces, joined, are the generated text.
    """

    token: GeneratedToken
    text: str
    finish: FinishReason | None


class Assembler:
    """Releases tokens in order, each as soon as no part of its text can belong to a stop string that is cut off.

    text     The quick br|own fox
             ^^^^^^^^^^ ^^^^
             released   held: may begin the stop string "brown"
    """

    __slots__ = ("_decoder", "_held", "_length", "_matcher", "_options", "_tokens", "stop")

    def __init__(self, options: TextOptions) -> None:
        self._options = options
        self._decoder = IncrementalDecoder()
        self._matcher = StopMatcher(options.stops) if options.stops else None
        # Pieces not released yet, each with the position in the whole text where its own text ends.
        self._held: deque[tuple[Piece, int]] = deque()
        self._tokens = 0
        self._length = 0
        # The stop string that ended the text; "" if none did.
        self.stop = ""

    def push(self, token: GeneratedToken) -> list[Piece]:
        """Add the next token and return the pieces that can be sent now. Push nothing after a piece with ``finish``."""
        text = "" if self._hides(token) else self._decoder.push(token.piece)
        if token.finish is not None:
            text += self._decoder.flush()
        piece = Piece(token, text, token.finish)
        if self._matcher is None:
            return [piece]
        self._tokens += 1
        self._length += len(text)
        self._held.append((piece, self._length))
        match = self._matcher.feed(text, ignore_matches=self._tokens <= self._options.min_tokens)
        if match is not None:
            self.stop = match.stop
            return self._cut(match.end if self._options.keep_stop else match.start)
        if token.finish is not None or self._options.keep_stop:
            return self._release(self._length)
        return self._release(self._length - self._matcher.held)

    def flush(self) -> list[Piece]:
        """Return all held pieces when no token follows although none was the last, as after a deadline.

        The last returned piece gets FinishReason.LENGTH; the list is empty if nothing was held. The bytes of an
        unfinished character at the end are dropped.
        """
        released = self._release(self._length)
        if released:
            released[-1].finish = FinishReason.LENGTH
        return released

    def _hides(self, token: GeneratedToken) -> bool:
        """Return whether the token adds no text.

        With special text the end token is hidden unless stop strings are kept, as in vLLM. An ordinary token is always
        shown: a grammar may end a sequence with one.
        """
        if not token.special:
            return False
        ends = token.finish is FinishReason.EOS_TOKEN and not self._options.keep_stop
        return ends or not self._options.special_text

    def _release(self, end: int) -> list[Piece]:
        """Return the held pieces whose text ends at position ``end`` or before."""
        released = []
        while self._held and self._held[0][1] <= end:
            released.append(self._held.popleft()[0])
        return released

    def _cut(self, cut: int) -> list[Piece]:
        """Return all held pieces without their text after position ``cut``."""
        released = []
        for piece, end in self._held:
            if end > cut:
                piece.text = piece.text[: max(0, len(piece.text) - (end - cut))]
            released.append(piece)
        self._held.clear()
        released[-1].finish = FinishReason.STOP_SEQUENCE
        return released
