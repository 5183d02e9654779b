"""Gives decoding sequences drafts, which the same step verifies, where they are worth the time that they take."""

from collections.abc import Sequence
from math import expm1, log
from typing import NamedTuple

from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_shard.engine.model_drafting import Draftable, ModelDrafting
from caravan_shard.engine.step import Part
from caravan_shard.protocol.results import StepResult
from caravan_shard.sequences.sequence import Sequence as ShardSequence
from caravan_shard.speculation.draft import Draft, DraftKind
from caravan_shard.speculation.lengths import best_count, best_lengths, gains
from caravan_shard.speculation.model_drafter import ModelDrafter
from caravan_shard.speculation.step_costs import StepCosts

# One step in this many has no draft tokens, or a few, whatever they are worth, so that the cost of both is known.
_EXPLORES_EVERY = 32
_MOST_EXPLORED = 4
# A sequence whose drafts are hardly ever right is asked for one in one step of this many.
_ASKED_EVERY = 8


class DraftBudget(NamedTuple):
    """The most draft tokens of a step: of all sequences together, and of each."""

    total: int
    each: int


NO_DRAFTS = DraftBudget(0, 0)


class Drafting:
    """Chooses the drafts of steps. Learns what steps cost, and the sequences learn how often their drafts are right."""

    def __init__(self, *, always: bool = False) -> None:
        """``always``: use whatever fits, whether or not it is worth its time."""
        self._always = always
        self._costs = StepCosts()
        self._steps = 0
        self._model: ModelDrafting | None = None

    def use_model(self, drafter: ModelDrafter | None) -> None:
        """Let ``drafter`` draft too where that is worth its time."""
        self._model = None if drafter is None else ModelDrafting(drafter, self._costs, always=self._always)

    def choose(self, parts: list[Part], budget: DraftBudget, limits: LayoutLimits) -> list[Part]:
        """Return ``parts``, which decode a token each, with the drafts that fit ``budget`` and are worth their time.

        In the split layout, llama.cpp computes as many tokens of each sequence together as the one with the fewest has,
        and the others in a second ubatch, which reads the weights again. So there all drafts have one length.
        """
        self._steps += 1
        if self._model is not None:
            self._model.start_step()
        equal = limits.layout is KvLayout.SPLIT and len(parts) > 1
        least = self._least_probability(len(parts))
        explores = self._steps % _EXPLORES_EVERY == 0
        if (least > 1 and not explores) or not (self._always or self._costs.knows(len(parts))):
            return parts
        each = min(budget.each, budget.total // len(parts) if equal else budget.total)
        drafts: list[Draft | None] = []
        for part in parts:
            drafts.append(self._draft_of(part, each, limits, 0.0 if explores else least))
            if equal and drafts[-1] is None and self._model is None:
                return parts
        if self._model is not None and not explores:
            self._model.add(
                drafts, [Draftable(part.sequence, _most(part, each, limits)) for part in parts], equal=equal
            )
        survivals = [
            part.sequence.drafter.acceptance.survivals(draft) if draft is not None and part.sequence.drafter else ()
            for part, draft in zip(parts, drafts, strict=True)
        ]
        most = self._explored if explores else budget.total
        if equal and None in drafts:
            lengths = [0] * len(parts)
        elif equal:
            lengths = [self._equal_length(survivals, most, is_free=self._always or explores)] * len(parts)
        elif self._always or explores:
            lengths = _fill(survivals, most)
        else:
            lengths = best_lengths(survivals, most, self._costs)
        drafting = [
            part if draft is None or not length else part.with_draft(Draft(draft.tokens[:length], draft.kind))
            for part, draft, length in zip(parts, drafts, lengths, strict=True)
        ]
        if self._model is not None:
            self._model.forget_unused(drafting)
        return drafting

    def learn(self, parts: Sequence[Part], result: StepResult) -> None:
        """Learn from a step over ``parts``."""
        drafted = 0 if result.drafts is None else sum(result.drafts.drafted)
        seconds = result.timings.total_ns / 1e9
        if self._model is not None:
            seconds = self._model.end_step(seconds)
        self._costs.observe(len(parts) + drafted, seconds)
        for part in parts:
            if part.sequence.drafter is not None:
                part.sequence.drafter.acceptance.observe(part.sequence.tokens[part.start + 1 :])

    @property
    def _explored(self) -> int:
        """Return how many draft tokens to try: every other time none, so that steps without drafts are known too."""
        times = self._steps // _EXPLORES_EVERY
        return 0 if times % 2 else 1 + times // 2 % _MOST_EXPLORED

    def _least_probability(self, sequences: int) -> float:
        """Return the probability that a single draft token needs to be worth its time."""
        if self._always:
            return 0.0
        longer = log(self._costs.seconds(sequences + 1) / self._costs.seconds(sequences))
        return expm1(max(0.0, sequences * longer))

    def _equal_length(self, survivals: Sequence[Sequence[float]], most: int, *, is_free: bool) -> int:
        """Return the best length for the drafts of all."""
        length = min(min(map(len, survivals)), most // len(survivals))
        if is_free:
            return length
        slots = [sum(column) for column in zip(*map(gains, survivals), strict=False)][:length]
        return best_count(slots, len(survivals), self._costs, tokens_each=len(survivals))

    def _draft_of(self, part: Part, most: int, limits: LayoutLimits, least: float) -> Draft | None:
        """Return the draft of a sequence; None if it has none that may be right with a probability of ``least``."""
        sequence = part.sequence
        if sequence.drafter is None:
            return None
        acceptance = sequence.drafter.acceptance
        if acceptance.most_probable < least and (self._steps + sequence.sequence_id) % _ASKED_EVERY:
            return None
        most = _most(part, most, limits)
        draft = _propose(sequence, most) if most > 0 else None
        if draft is not None:
            acceptance.watch(draft)
        return draft


def _most(part: Part, most: int, limits: LayoutLimits) -> int:
    """Return how many draft tokens a sequence may have; not above 0 if none."""
    sequence, parameters = part.sequence, part.sequence.parameters
    # The token after the last draft must not exceed the length either.
    return min(
        most,
        limits.rollback_tokens if limits.whole_only else most,
        parameters.max_draft_tokens,
        parameters.max_length - len(sequence.tokens) - 1,
        limits.cells_per_sequence - sequence.computed - 1,
    )


def _propose(sequence: ShardSequence, most: int) -> Draft | None:
    assert sequence.drafter is not None
    draft = sequence.drafter.propose(sequence.tokens, sequence.parameters.prompt_length, most)
    if sequence.matching is None:
        return draft
    matched = 0 if draft is None else sequence.matching.count_matching(draft.tokens)
    copied = Draft(draft.tokens[:matched], draft.kind) if draft is not None and matched else None
    tokens = sequence.matching.forced(most)
    forced = Draft(tokens, DraftKind.CONSTRAINT) if tokens else None
    if copied is None or forced is None:
        return copied or forced
    survivals = sequence.drafter.acceptance.survivals
    return forced if sum(survivals(forced)) > sum(survivals(copied)) else copied


def _fill(survivals: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return the lengths of whole drafts, one after another, together at most ``most``."""
    lengths = []
    for row in survivals:
        lengths.append(min(len(row), most))
        most -= lengths[-1]
    return lengths
