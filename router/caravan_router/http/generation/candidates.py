"""How many texts a prompt is given, and which of them are the best."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_router.http.generation.rules import BestOfAboveNStreamingError, BestOfBelowNError, CandidatesError
from caravan_router.http.limits import Limits
from caravan_router.http.openai.schema import CompletionRequest
from caravan_router.text.assembler import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Of each prompt, ``candidates`` >= ``n`` are generated and the ``n`` best returned."""

    n: int
    candidates: int

    @property
    def ranked(self) -> bool:
        return self.candidates > self.n


def check_candidates(field: str, count: int, limits: Limits) -> None:
    """``n`` and ``best_of`` alike. Raises CandidatesError."""
    if not 1 <= count <= limits.max_best_of:
        raise CandidatesError(field, limits.max_best_of, count)


def choices_of(request: CompletionRequest, limits: Limits) -> Choices:
    """Raises ValidationError."""
    n = 1 if request.n is None else request.n
    candidates = n if request.best_of is None else request.best_of
    check_candidates("n", n, limits)
    check_candidates("best_of", candidates, limits)
    if candidates < n:
        raise BestOfBelowNError(n, candidates)
    if candidates > n and request.stream:
        raise BestOfAboveNStreamingError(n, candidates)
    return Choices(n=n, candidates=candidates)


def best_first(candidates: Sequence[Sequence[Piece]]) -> list[int]:
    """Indices by mean logprob, as TGI ranks: a sum would prefer the short ones. Of equals, the first."""
    means = [_mean_logprob(pieces) for pieces in candidates]
    return sorted(range(len(candidates)), key=lambda index: -means[index])


def _mean_logprob(pieces: Sequence[Piece]) -> float:
    logprobs = [piece.token.logprob for piece in pieces if piece.token.logprob is not None]
    assert len(logprobs) == len(pieces) > 0, "ranking needs a logprob for each token"
    return sum(logprobs) / len(logprobs)
