"""Reads the columns of a step's result, whether protobuf brought them or a shard in this process."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from caravan_proto.messages.results import DraftCount, DraftSource, FinishReason
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, PromptToken, maker

_generated_token, _alternative = maker(GeneratedToken), maker(Alternative)


class Alternatives(Protocol):
    """Columns of alternatives, in order: ``top_counts`` of each token."""

    @property
    def top_counts(self) -> Sequence[int]: ...
    @property
    def top_token_ids(self) -> Sequence[int]: ...
    @property
    def top_logprobs(self) -> Sequence[float]: ...
    @property
    def top_pieces(self) -> Sequence[bytes]: ...
    @property
    def top_specials(self) -> Sequence[bool]: ...


class Tokens(Alternatives, Protocol):
    """Columns of sampled tokens."""

    @property
    def sequence_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def pieces(self) -> Sequence[bytes]: ...
    @property
    def specials(self) -> Sequence[bool]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def feedback(self) -> Sequence[float]: ...


class Logprobs(Alternatives, Protocol):
    """Columns of log probabilities: ``counts`` entries of each sequence."""

    @property
    def sequence_ids(self) -> Sequence[int]: ...
    @property
    def counts(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...


class Drafts(Protocol):
    """Columns of drafts."""

    @property
    def sequence_ids(self) -> Sequence[int]: ...
    @property
    def drafted(self) -> Sequence[int]: ...
    @property
    def accepted(self) -> Sequence[int]: ...


def tokens_of(columns: Tokens, finishes: Iterable[FinishReason | None]) -> tuple[tuple[int, GeneratedToken], ...]:
    """Return the tokens, each with the id of its sequence."""
    # Slices make lists at once; protobuf's iterators look up element by element.
    sequence_ids = columns.sequence_ids[:]
    logprobs = [None if math.isnan(value) else value for value in columns.logprobs] or [None] * len(sequence_ids)
    alternatives = alternatives_of(columns) if columns.top_counts else [()] * len(sequence_ids)
    fields = zip(
        columns.token_ids[:], columns.pieces[:], columns.specials[:], logprobs, alternatives, finishes, strict=True
    )
    return tuple(zip(sequence_ids, map(_generated_token, fields), strict=True))


def feedback_of(columns: Tokens) -> tuple[tuple[int, float], ...]:
    """Return what sequences carry to their next tokens."""
    if not columns.feedback:
        return ()
    rows = zip(columns.sequence_ids, columns.feedback, strict=True)
    return tuple((sequence_id, value) for sequence_id, value in rows if not math.isnan(value))


def drafts_of(columns: Drafts, sources: Iterable[DraftSource]) -> tuple[tuple[int, DraftCount], ...]:
    """Return the draft tokens of each sequence that had any."""
    if not columns.sequence_ids:
        return ()
    rows = zip(columns.sequence_ids, sources, columns.drafted, columns.accepted, strict=True)
    return tuple(
        (sequence_id, DraftCount(source, drafted, accepted)) for sequence_id, source, drafted, accepted in rows
    )


def prompt_logprobs_of(columns: Logprobs) -> tuple[tuple[int, tuple[PromptToken, ...]], ...]:
    """Return the prompt tokens of each sequence."""
    tokens = [
        PromptToken(None if math.isnan(logprob) else logprob, top)
        for logprob, top in zip(columns.logprobs, alternatives_of(columns), strict=True)
    ]
    rows, start = [], 0
    for sequence_id, count in zip(columns.sequence_ids, columns.counts, strict=True):
        rows.append((sequence_id, tuple(tokens[start : start + count])))
        start += count
    return tuple(rows)


def alternatives_of(columns: Alternatives) -> tuple[tuple[Alternative, ...], ...]:
    """Return the alternatives of each token."""
    fields = zip(
        columns.top_token_ids[:],
        columns.top_pieces[:],
        columns.top_specials[:],
        columns.top_logprobs[:],
        strict=True,
    )
    flat = list(map(_alternative, fields))
    rows, start = [], 0
    for count in columns.top_counts:
        rows.append(tuple(flat[start : start + count]))
        start += count
    return tuple(rows)
