"""Ranks the candidates of a prompt."""

from collections.abc import Sequence

from caravan_dialects.text.assembler import Piece


def best_first(candidates: Sequence[Sequence[Piece]]) -> list[int]:
    """Return the candidates' indices by descending mean logprob. Candidates of equal rank keep their order.

    TGI ranks by the mean too: a sum would prefer short candidates. A candidate without a token comes last.
    """
    means = [_mean_logprob(pieces) for pieces in candidates]
    return sorted(range(len(candidates)), key=lambda index: -means[index])


def _mean_logprob(pieces: Sequence[Piece]) -> float:
    if not pieces:
        return float("-inf")
    logprobs = [piece.token.logprob for piece in pieces if piece.token.logprob is not None]
    assert len(logprobs) == len(pieces), "ranking needs a logprob for each token"
    return sum(logprobs) / len(logprobs)
