"""Tokens as they come back from a shard."""

from dataclasses import dataclass

from caravan_router.core.sampling import FinishReason


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the most likely tokens at a position."""

    token_id: int
    piece: bytes
    special: bool
    logprob: float


@dataclass(frozen=True, slots=True)
class PromptToken:
    """How likely a token of the prompt was after those before it; None for the first, which follows nothing."""

    logprob: float | None
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A sampled token. ``piece`` is raw bytes: a character may be split over tokens. Control tokens are ``special``.

    ``logprob`` is the natural logarithm of its probability under the model's own distribution, None if not asked for.
    ``finish`` is set on the last token of the sequence.
    """

    token_id: int
    piece: bytes
    special: bool
    logprob: float | None
    alternatives: tuple[Alternative, ...]
    finish: FinishReason | None
