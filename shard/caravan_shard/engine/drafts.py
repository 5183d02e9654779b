"""Gives decoding sequences drafts, which the same step verifies."""

from typing import NamedTuple

from caravan_shard.backends.base import LayoutLimits
from caravan_shard.engine.step import Part
from caravan_shard.kv_layout import KvLayout
from caravan_shard.sequences.sequence import Sequence
from caravan_shard.speculation.draft import Draft, DraftSource


class DraftBudget(NamedTuple):
    """The most draft tokens of a step: of all sequences together, and of each."""

    total: int
    each: int


NO_DRAFTS = DraftBudget(0, 0)


def with_drafts(parts: list[Part], budget: DraftBudget, limits: LayoutLimits) -> list[Part]:
    """Return ``parts``, which decode a token each, with the drafts that fit ``budget`` and the cells of a sequence."""
    if limits.layout is KvLayout.SPLIT and len(parts) > 1:
        return _with_equal_drafts(parts, budget, limits)
    total = budget.total
    drafted = []
    for part in parts:
        draft = _draft_of(part, min(total, budget.each), limits)
        if draft is not None:
            total -= len(draft.tokens)
            part = part.with_draft(draft)
        drafted.append(part)
    return drafted


def _with_equal_drafts(parts: list[Part], budget: DraftBudget, limits: LayoutLimits) -> list[Part]:
    """Give all parts drafts of one length, or none.

    In the split layout, llama.cpp computes as many tokens of each sequence together as the one with the fewest has, and
    the others in a second ubatch, which reads the weights again.
    """
    most = min(budget.each, budget.total // len(parts))
    drafts: list[Draft] = []
    for part in parts:
        draft = _draft_of(part, most, limits)
        if draft is None:
            return parts
        drafts.append(draft)
        most = len(draft.tokens)
    return [
        part.with_draft(Draft(draft.tokens[:most], draft.source)) for part, draft in zip(parts, drafts, strict=True)
    ]


def _draft_of(part: Part, most: int, limits: LayoutLimits) -> Draft | None:
    sequence = part.sequence
    parameters = sequence.parameters
    # The token after the last draft must not exceed the length either.
    most = min(
        most,
        parameters.max_draft_tokens,
        parameters.max_length - len(sequence.tokens) - 1,
        limits.cells_per_sequence - sequence.computed - 1,
    )
    return _propose(sequence, most) if most > 0 and sequence.drafter is not None else None


def _propose(sequence: Sequence, most: int) -> Draft | None:
    assert sequence.drafter is not None
    if sequence.matching is None:
        return sequence.drafter.propose(sequence.tokens, sequence.parameters.prompt_length, most)
    forced = sequence.matching.forced(most)
    if forced:
        return Draft(forced, DraftSource.CONSTRAINT)
    draft = sequence.drafter.propose(sequence.tokens, sequence.parameters.prompt_length, most)
    if draft is None:
        return None
    matched = sequence.matching.count_matching(draft.tokens)
    return Draft(draft.tokens[:matched], draft.source) if matched else None
