"""Gives decoding sequences drafts, which the same step verifies, where they are worth the time that they take."""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, expm1, log
from typing import NamedTuple

from caravan_proto.messages.limits import KvLayout, LayoutLimits
from caravan_shard.engine.step import Part
from caravan_shard.protocol.results import StepResult
from caravan_shard.sequences.sequence import Sequence as ShardSequence
from caravan_shard.speculation.acceptance import Draft, DraftKind
from caravan_shard.speculation.model_drafter import READ_AT_ONCE, DraftInput, ModelDrafter
from caravan_shard.speculation.step_costs import StepCosts, best_count, best_lengths, gains

# Where drafts do not pay, this share of the time is spent on drafts of this length, to find out whether they do by now.
_EXPLORING = 0.005
_EXPLORED_TOKENS = 2
# Most time that is saved up for that, in seconds.
_MOST_SAVED_S = 5.0
# A sequence is expected to get as many tokens again as its output has, and at least this many.
_LEAST_COMING = 16
# Fewest tokens of a sequence that the model reads in a step.
_LEAST_READ = 32

# One step in this many has no draft tokens, or a few, whatever they are worth, so that the cost of both is known.
_EXPLORES_EVERY = 32
_MOST_EXPLORED = 4
# A sequence whose drafts are hardly ever right is asked for one in one step of this many.
_ASKED_EVERY = 8


class Draftable(NamedTuple):
    """A sequence of a step, and how many draft tokens it may have; not above 0 if none."""

    sequence: ShardSequence
    most: int


class _Candidate(NamedTuple):
    """A sequence that could get a draft of the model.

    ``gains``: by how much a draft of each length, from 0 on, raises the logarithm of its expected tokens.
    ``missing``: how many of its tokens the model must read.
    """

    place: int
    sequence: ShardSequence
    gains: Sequence[float]
    missing: int

    @property
    def coming(self) -> int:
        """Number of tokens that it is expected to get."""
        parameters, length = self.sequence.parameters, len(self.sequence.tokens)
        return min(parameters.max_length - length, max(_LEAST_COMING, length - parameters.prompt_length))

    @property
    def asked(self) -> DraftInput:
        """The part of the sequence that the drafter needs."""
        sequence = self.sequence
        sampling = sequence.parameters.sampling
        return DraftInput(sequence.sequence_id, sequence.tokens, sampling, sequence.penalties, sequence.biases)


class ModelDrafting:
    """Adds drafts of the model to a step where they raise the sum that `step_costs` describes, with the model's time.

    A sequence that the model has not read yet is read first, if what it is expected to gain is worth that: a part in
    each step, which takes no longer than the step, so that no other sequence waits long.
    """

    def __init__(self, drafter: ModelDrafter, steps: StepCosts, *, always: bool) -> None:
        """``steps``: the seconds of steps of the main model. ``always``: draft whatever it costs."""
        self._drafter = drafter
        self._steps = steps
        self._always = always
        self._counted_from = drafter.seconds
        self._saved_s = 0.0

    def start_step(self) -> None:
        """Begin to count the time of the model's steps."""
        self._counted_from = self._drafter.seconds

    def add(self, drafts: list[Draft | None], parts: Sequence[Draftable], *, equal: bool) -> None:
        """Add drafts to ``drafts``, one for each of ``parts``, where there is none or a less promising one.

        ``equal``: drafts are of no use unless all ``parts`` have one.
        """
        candidates = self._candidates(drafts, parts)
        if not candidates:
            return
        length, value = self._best_length(candidates, len(parts))
        if length == 0:
            self._explore(min(candidates, key=lambda one: one.missing))
            return
        self._read(candidates, len(parts), value)
        ready = [one for one in candidates if self._missing(one.sequence) <= READ_AT_ONCE]
        length, _ = self._best_length(ready, len(parts))
        is_useless = equal and sum(draft is None for draft in drafts) > sum(drafts[one.place] is None for one in ready)
        if length and not is_useless:
            self._propose(drafts, ready, length)

    def forget_unused(self, parts: Sequence[Part]) -> None:
        """Let the model hold no draft tokens but those that the step over ``parts`` verifies."""
        for part in parts:
            is_used = part.draft is not None and part.draft.kind is DraftKind.MODEL
            drafted = len(part.tokens) - 1 if is_used else 0
            self._drafter.keep_draft(part.sequence.sequence_id, len(part.sequence.tokens), drafted)

    def end_step(self, seconds: float) -> float:
        """Return how many of the ``seconds`` of the step were not the model's."""
        others = seconds - (self._drafter.seconds - self._counted_from)
        self._saved_s = min(_MOST_SAVED_S, self._saved_s + _EXPLORING * others)
        return others

    def _candidates(self, drafts: Sequence[Draft | None], parts: Sequence[Draftable]) -> list[_Candidate]:
        found = []
        ids = {part.sequence.sequence_id for part in parts}
        for place, ((sequence, most), draft) in enumerate(zip(parts, drafts, strict=True)):
            most = min(most, self._drafter.longest - len(sequence.tokens))
            if sequence.drafter is None or most <= 0:
                continue
            acceptance = sequence.drafter.acceptance
            survivals = acceptance.survivals(Draft(range(most), DraftKind.MODEL))
            other = [] if draft is None else acceptance.survivals(draft)
            if other and other[0] >= survivals[0]:
                continue
            sequence_id, tokens = sequence.sequence_id, sequence.tokens
            if not self._drafter.can_read(sequence_id, tokens):
                continue
            if not self._drafter.has_room(sequence_id, len(tokens) + most, ids):
                continue
            base = log(1 + sum(other))
            gains = [log(expected) - base for expected in accumulate(survivals, initial=1.0)]
            found.append(_Candidate(place, sequence, gains, self._missing(sequence)))
        return found

    def _best_length(self, candidates: Sequence[_Candidate], sequences: int) -> tuple[int, float]:
        """Return the best length of the drafts of ``candidates`` and its value; (0, 0.0) if none pays."""
        if not candidates or self._always:
            return max((len(one.gains) - 1 for one in candidates), default=0), 0.0
        steps, drafting = self._steps, self._drafter.costs
        base = log(steps.seconds(sequences))
        first = drafting.seconds(sum(min(one.missing, READ_AT_ONCE) for one in candidates))
        next_s = drafting.seconds(len(candidates))
        best, best_value = 0, 0.0
        for length in range(1, max(len(one.gains) for one in candidates)):
            gains = [one.gains[min(length, len(one.gains) - 1)] for one in candidates]
            seconds = steps.seconds(sequences + length * len(candidates)) + first + (length - 1) * next_s
            value = sum(gains) - sequences * (log(seconds) - base)
            if value > best_value:
                best, best_value = length, value
        return best, best_value

    def _read(self, candidates: Sequence[_Candidate], sequences: int, value: float) -> None:
        """Let the model read a part of a sequence that is worth it."""
        unread = [one for one in candidates if one.missing > READ_AT_ONCE]
        if self._always:
            for one in unread:
                self._drafter.read_up_to(one.sequence.sequence_id, one.sequence.tokens, READ_AT_ONCE)
            return
        step_s = self._steps.seconds(sequences)
        saved_s = step_s * (1 - exp(-value / sequences)) / len(candidates)
        for one in sorted(unread, key=lambda one: one.missing):
            if saved_s * one.coming > self._reading_s(one.missing, step_s):
                self._drafter.read(one.sequence.sequence_id, one.sequence.tokens, self._most_read(step_s))
                return

    def _missing(self, sequence: ShardSequence) -> int:
        return self._drafter.missing(sequence.sequence_id, sequence.tokens)

    def _reading_s(self, tokens: int, step_s: float) -> float:
        """Return how long it takes to read ``tokens``."""
        part = min(tokens, self._most_read(step_s))
        return self._drafter.costs.seconds(part) * tokens / part

    def _most_read(self, step_s: float) -> int:
        """Return how many tokens are read in the time of a step."""
        count = _LEAST_READ
        while self._drafter.costs.seconds(2 * count) <= step_s and count < 1024:
            count *= 2
        return count

    def _explore(self, one: _Candidate) -> None:
        """Draft for a sequence without using the draft, if enough time was saved up for that."""
        cost_s = self._drafter.costs.seconds(min(one.missing, _LEAST_READ)) + self._drafter.costs.seconds(1)
        if self._saved_s < cost_s:
            return
        before = self._drafter.seconds
        if one.missing > READ_AT_ONCE:
            self._drafter.read(one.sequence.sequence_id, one.sequence.tokens, _LEAST_READ)
        else:
            drafts: list[Draft | None] = [None] * (one.place + 1)
            self._propose(drafts, [one], min(_EXPLORED_TOKENS, len(one.gains) - 1))
            self._drafter.keep(one.sequence.sequence_id, len(one.sequence.tokens))
        self._saved_s -= self._drafter.seconds - before

    def _propose(self, drafts: list[Draft | None], candidates: Sequence[_Candidate], length: int) -> None:
        proposed = self._drafter.propose([one.asked for one in candidates], length)
        for one, tokens in zip(candidates, proposed, strict=True):
            matching, most = one.sequence.matching, len(one.gains) - 1
            count = min(len(tokens), most) if matching is None else matching.count_matching(tokens[:most])
            if count and one.sequence.drafter is not None:
                draft = Draft(tokens[:count], DraftKind.MODEL)
                drafts[one.place] = draft
                one.sequence.drafter.acceptance.watch(draft)


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
