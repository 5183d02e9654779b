"""Tokens as shards return them: named tuples, which cost half of what frozen dataclasses do to make."""

from typing import NamedTuple

from caravan_proto.messages.results import FinishReason


class Alternative(NamedTuple):
    """One of the most likely tokens at a position."""

    token_id: int
    piece: bytes
    special: bool
    logprob: float


class PromptToken(NamedTuple):
    """The logprob of a prompt token given the tokens before it; None for the first token, which follows nothing."""

    logprob: float | None
    alternatives: tuple[Alternative, ...]


class GeneratedToken(NamedTuple):
    """A sampled token.

    ``piece`` is raw bytes: a character may be split over several tokens. ``special`` marks control tokens. ``logprob``
    is the natural logarithm of the token's probability under the model's own distribution, None if not asked for.
    ``finish`` is set on the last token of the sequence.
    """

    token_id: int
    piece: bytes
    special: bool
    logprob: float | None
    alternatives: tuple[Alternative, ...]
    finish: FinishReason | None
