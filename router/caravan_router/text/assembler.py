"""Tokens to pieces of text that may leave."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import GeneratedToken
from caravan_router.text.detokenize import IncrementalDecoder
from caravan_router.text.stops import StopMatch, StopMatcher


@dataclass(slots=True)
class Piece:
    """A token and the text it adds: "" for a control token, and inside a stop string.

    ``finish`` is set on the last piece only. The texts of all pieces joined are the generated text.
    """

    token: GeneratedToken
    text: str
    finish: FinishReason | None


class Assembler:
    """Each token leaves once no part of its text can belong to a stop string, in order; ``push`` returns those that do.

    text     The quick br|own fox
             ^^^^^^^^^^ ^^^^
             released   held: may begin the stop string "brown"
    """

    __slots__ = ("_decoder", "_held", "_length", "_matcher")

    def __init__(self, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder()
        self._matcher = StopMatcher(stops) if stops else None
        # Tokens not released yet, each with where its text ends in the whole text.
        self._held: deque[tuple[Piece, int]] = deque()
        self._length = 0

    def push(self, token: GeneratedToken) -> list[Piece]:
        """What may leave now. After a piece with ``finish`` nothing may be pushed."""
        text = "" if token.special else self._decoder.push(token.piece)
        if token.finish is not None:
            text += self._decoder.flush()
        piece = Piece(token, text, token.finish)
        if self._matcher is None:
            return [piece]
        match = self._matcher.feed(text)
        self._length += len(text)
        self._held.append((piece, self._length))
        if match is not None:
            return self._cut(match)
        if token.finish is not None:
            return self._release(self._length)
        return self._release(self._length - self._matcher.held)

    def _release(self, safe: int) -> list[Piece]:
        released = []
        while self._held and self._held[0][1] <= safe:
            released.append(self._held.popleft()[0])
        return released

    def _cut(self, match: StopMatch) -> list[Piece]:
        released = []
        for piece, end in self._held:
            if end > match.start:
                piece.text = piece.text[: max(0, len(piece.text) - (end - match.start))]
            released.append(piece)
        self._held.clear()
        released[-1].finish = FinishReason.STOP_SEQUENCE
        return released
