"""Log probabilities of a chat choice."""

from collections.abc import Sequence

from caravan_dialects.api.openai.chat.schema import ChatLogprobs, TokenAlternative, TokenLogprob
from caravan_dialects.text.assembler import Piece
from caravan_dialects.text.detokenize import display_text


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
