"""What a completion's choice is made of, built up token by token."""

from collections.abc import Iterable, Sequence

from caravan_router.core.sampling import FinishReason
from caravan_router.core.tokens import Alternative
from caravan_router.http.openai.schema import CompletionChoice, Logprobs
from caravan_router.text.assembler import Piece
from caravan_router.text.detokenize import display_text

# OpenAI knows no word for the difference between the model's own end and a stop string.
FINISH_WORDS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


def choice_of(index: int, pieces: Sequence[Piece], offset: int, logprobs: int | None) -> CompletionChoice:
    """``pieces``, or a stream's next of them; ``offset``: characters of the choice before. ``logprobs``: as asked.

    Without pieces: of a request for no tokens.
    """
    finish = pieces[-1].finish if pieces else FinishReason.LENGTH
    return CompletionChoice(
        index=index,
        text="".join([piece.text for piece in pieces]),
        logprobs=None if logprobs is None else _logprobs(pieces, offset, logprobs),
        finish_reason=None if finish is None else FINISH_WORDS[finish],
    )


def _logprobs(pieces: Sequence[Piece], offset: int, top: int) -> Logprobs:
    """Columns for ``pieces``, whose text begins at ``offset`` of the choice's; ``tokens`` joined are that text.

    ``top_logprobs`` holds the ``top`` likeliest tokens and the one chosen, as OpenAI has it; null if ``top`` is 0.
    """
    offsets = []
    for piece in pieces:
        offsets.append(offset)
        offset += len(piece.text)
    return Logprobs(
        tokens=[piece.text for piece in pieces],
        token_logprobs=[piece.token.logprob for piece in pieces],
        top_logprobs=[
            top_logprobs(piece.token.piece, piece.token.logprob, piece.token.alternatives[:top]) for piece in pieces
        ]
        if top
        else None,
        text_offset=offsets,
    )


def top_logprobs(token: bytes, logprob: float | None, alternatives: Iterable[Alternative]) -> dict[str, float]:
    """The likeliest tokens and the one that is there."""
    top = {display_text(other.piece): other.logprob for other in alternatives}
    if logprob is not None:
        top.setdefault(display_text(token), logprob)
    return top
