"""Tokens as shards return them: named tuples, which cost half of what frozen dataclasses do to make. And their runs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

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


Made = TypeVar("Made", bound=tuple[Any, ...])


def maker(kind: type[Made]) -> Callable[[Iterable[Any]], Made]:
    """Return what makes a named tuple ``kind`` of all of its fields in order, at half of the constructor's cost."""
    return functools.partial(tuple.__new__, kind)


def block_hashes(tokens: tuple[int, ...], size: int) -> list[int]:
    """Return a hash of each whole block of ``size`` tokens."""
    # Faster than slices: `zip` gives the same tuple again and again.
    return list(map(hash, zip(*[iter(tokens)] * size, strict=False)))


Run = TypeVar("Run", list[int], tuple[int, ...])


def common_length(a: Run, b: Run, known: int = 0) -> int:
    """Return how many first tokens of ``a`` and ``b`` are equal; the first ``known`` are."""
    if a == b:  # which copies nothing
        return len(a)
    low, high = known, min(len(a), len(b)) + 1  # the first `low` are equal, the first `high` are not
    middle = high - 1  # mostly one is a prefix of the other
    while high - low > 1:
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low
