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
from caravan_shard.speculation.draft_plan import DraftCosts, Draftee, best_drafts, best_equal_drafts
from caravan_shard.speculation.model_drafter import READ_AT_ONCE, DraftInput, ModelDrafter
from caravan_shard.speculation.step_costs import Seconds, StepCosts, best_count, best_lengths, gains
from caravan_shard.speculation.tries import Pauses, Savings, Tries

# Where drafts of the model do not pay, this share of the time is spent on short ones, to see whether they do by now.
_EXPLORING = 0.005
_EXPLORED_TOKENS = 2
# About so many of these drafts need not wait for that.
_FIRST_DRAFTS = 16
# As much time is spent on steps with as many tokens as may be worth it, but were seldom measured, if the logarithm of
# the rate of the sequences may grow by so much more.
_HOPE = 0.01
# Time for so many such steps is there at first for each number of sequences, and is saved before the next ones: the
# model may have to read a lot.
_TRIES = 6
# A sequence is expected to get as many tokens again as its output has, and at least this many.
_LEAST_COMING = 32
# Fewest tokens of a sequence that the model reads in a step.
_LEAST_READ = 32

# One step in this many has no draft tokens, or a few, whatever they are worth, so that the cost of both is known.
_EXPLORES_EVERY = 32
_MOST_EXPLORED = 4
# If a step changes its number of tokens, as many as this are expected to have the new number.
_KEPT_FOR = 4
# A sequence whose drafts are hardly ever right is asked for one in one step of this many.
_ASKED_EVERY = 8


class Draftable(NamedTuple):
    """A sequence of a step, and how many draft tokens it may have; not above 0 if none."""

    sequence: ShardSequence
    most: int


class _Candidate(NamedTuple):
    """A sequence that could get a draft of the model.

    ``draftee``: what a draft is worth. ``missing``: how many of its tokens the model must read.
    """

    place: int
    sequence: ShardSequence
    draftee: Draftee
    missing: int

    @property
    def most(self) -> int:
        """Most tokens of a draft."""
        return len(self.draftee.gains)

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


class _Sizes(NamedTuple):
    """How many sequences a step has, the most draft tokens of all together, and whether all have as many."""

    sequences: int
    most: int
    equal: bool


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
        # At first, nothing is known of the drafts.
        self._savings = Savings(_EXPLORING, _FIRST_DRAFTS * _EXPLORED_TOKENS * drafter.costs.seconds(1))
        self._explored = 0
        self._tries = Tries(_EXPLORING)
        self._is_try = False
        # Steps of ``_resting`` sequences for which no draft pays, and those without anything to try.
        self._rests, self._resting = Pauses(), 0
        self._hopeless = Pauses()
        # Numbers of tokens that the next step can have without a change of the graph.
        self._free: tuple[int, int | None] = (0, None)

    def start_step(self, sequences: int, before: int | None) -> None:
        """Begin to count the time of the model's steps. ``before``: the tokens of the last step, if that is known."""
        self._counted_from = self._drafter.seconds
        self._free = (sequences, before)
        self._is_try = False

    @property
    def seconds(self) -> Seconds:
        """What steps cost, as far as that decides about the drafts of this one."""
        return self._with_change(self._steps.bounds().best if self._is_try else self._steps.seconds)

    def _with_change(self, seconds: Seconds) -> Seconds:
        """Add what another number of tokens costs, except without drafts: none is of use because there were some."""
        change_s = self._steps.change_s / _KEPT_FOR
        return lambda tokens: seconds(tokens) + (0.0 if tokens in self._free else change_s)

    def add(self, drafts: list[Draft | None], parts: Sequence[Draftable], most: int, *, equal: bool) -> None:
        """Add drafts to ``drafts``, one for each of ``parts``, where there is none or a less promising one.

        ``most``: draft tokens of all together. ``equal``: drafts are of no use unless all ``parts`` have one.
        """
        enough_s = _TRIES * (self._steps.seconds(len(parts)) + self._drafter.costs.seconds(len(parts)))
        may_try = self._tries.are_allowed(len(parts), enough_s) and not self._always
        if self._rests.skips() and len(parts) == self._resting:
            return
        candidates = self._candidates(drafts, parts)
        if not candidates:
            return
        sizes = _Sizes(len(parts), most, equal=equal)
        chosen, value = self._plan(candidates, sizes)
        if may_try:
            chosen, value = self._try_another(candidates, sizes, chosen, value)
        self._rests.note(is_failure=not chosen)
        if not chosen:
            self._resting = len(parts)
            self._explore(candidates)
            return
        wanted = [one for one, _ in chosen]
        ready = self._ready(wanted, sizes, value)
        if len(ready) < len(wanted):
            chosen, _ = self._plan(ready, sizes)
        places = {one.place for one, _ in chosen}
        if others := [one for one in candidates if one.place not in places]:
            self._explore(others)
        is_useless = equal and any(draft is None and place not in places for place, draft in enumerate(drafts))
        if chosen and not is_useless:
            self._propose(drafts, chosen)

    def forget_unused(self, parts: Sequence[Part]) -> None:
        """Let the model hold no draft tokens but those that the step over ``parts`` verifies."""
        for part in parts:
            is_used = part.draft is not None and part.draft.kind is DraftKind.MODEL
            drafted = len(part.tokens) - 1 if is_used else 0
            self._drafter.keep_draft(part.sequence.sequence_id, len(part.sequence.tokens), drafted)

    def end_step(self, seconds: float, sequences: int, tokens: int, new: int) -> float:
        """Return how many of the ``seconds`` of a step over ``tokens`` were not the model's.

        ``new``: how many tokens its ``sequences`` have got.
        """
        drafting_s = self._drafter.seconds - self._counted_from
        others = seconds - drafting_s
        self._savings.save(others)
        self._tries.savings.save(others)
        if self._is_try:
            # A step that something else disturbed costs no more than others like it.
            took_s = drafting_s + min(others, 2 * self.seconds(tokens))
            self._tries.savings.seconds -= max(0.0, took_s - self._steps.seconds(sequences) * new / sequences)
        return others

    def _candidates(self, drafts: Sequence[Draft | None], parts: Sequence[Draftable]) -> list[_Candidate]:
        found = []
        ids = {part.sequence.sequence_id for part in parts}
        for place, ((sequence, most), draft) in enumerate(zip(parts, drafts, strict=True)):
            most = min(most, self._drafter.most(len(sequence.tokens)))
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
            if not self._drafter.has_room(sequence_id, self._drafter.cells(len(tokens), most), ids):
                continue
            expected = list(accumulate(survivals, initial=1.0))
            before = [1 + sum(other), *expected[1:]]
            missing = self._missing(sequence)
            draftee = Draftee(
                [log(with_it / without) for with_it, without in zip(expected[1:], before, strict=False)],
                # What a block costs is known with what is usually read before it.
                1 if self._drafter.drafts_blocks else max(1, min(missing, round(expected[-1]))),
            )
            found.append(_Candidate(place, sequence, draftee, missing))
        return found

    def _plan(self, candidates: Sequence[_Candidate], sizes: _Sizes) -> tuple[list[tuple[_Candidate, int]], float]:
        """Return the drafts that are worth their time, by their lengths, and what they are worth."""
        if self._always or not candidates:
            return [(one, one.most) for one in candidates], 0.0
        find = best_equal_drafts if sizes.equal else best_drafts
        draftees = [one.draftee for one in candidates]
        bounds = self._steps.bounds()
        steps = self._with_change(bounds.best if self._is_try else bounds.worst)
        costs = DraftCosts(steps, self._drafter.costs.seconds, self._drafter.at_once)
        plan = find(draftees, sizes.sequences, sizes.most, costs)
        chosen = [(one, length) for one, length in zip(candidates, plan.lengths, strict=True) if length]
        return chosen, plan.value

    def _try_another(
        self, candidates: Sequence[_Candidate], sizes: _Sizes, chosen: list[tuple[_Candidate, int]], value: float
    ) -> tuple[list[tuple[_Candidate, int]], float]:
        """Return the drafts of the best case if they may be worth more than ``value``, else the ``chosen``."""
        if self._hopeless.skips():
            return chosen, value
        self._is_try = True
        tried, hope = self._plan(candidates, sizes)
        self._is_try = hope > value + _HOPE * sizes.sequences
        self._hopeless.note(is_failure=not self._is_try)
        return (tried, hope) if self._is_try else (chosen, value)

    def _ready(self, wanted: Sequence[_Candidate], sizes: _Sizes, value: float) -> list[_Candidate]:
        """Return those that can be drafted for. Lets the model read of the others what is worth it.

        What is read only once takes little longer than a step of the main model.
        """
        if self._always:
            for one in wanted:
                self._drafter.read_up_to(one.sequence.sequence_id, one.sequence.tokens, READ_AT_ONCE)
            return list(wanted)
        step_s = self._steps.seconds(sizes.sequences)
        saved_s = step_s * (1 - exp(-value / sizes.sequences)) / len(wanted)
        left_s = step_s
        found: list[_Candidate] = []
        for one in sorted(wanted, key=lambda one: one.missing):
            catching_up_s = self._catching_up_s(one, step_s)
            if catching_up_s > saved_s * one.coming or (left_s <= 0 and not sizes.equal):
                continue
            if one.missing > READ_AT_ONCE:
                most = self._most_read(step_s)
                self._drafter.read(one.sequence.sequence_id, one.sequence.tokens, most)
                catching_up_s = self._drafter.reading.seconds(min(most, one.missing))
            left_s -= catching_up_s
            if self._missing(one.sequence) <= READ_AT_ONCE:
                found.append(one)
        return sorted(found, key=lambda one: one.place)

    def _catching_up_s(self, one: _Candidate, step_s: float) -> float:
        """Return how long it takes to read what is read only once."""
        if one.missing > READ_AT_ONCE:
            return self._reading_s(one.missing, step_s)
        reading = self._drafter.reading
        return reading.seconds(one.missing) - reading.seconds(one.draftee.read)

    def _missing(self, sequence: ShardSequence) -> int:
        return self._drafter.missing(sequence.sequence_id, sequence.tokens)

    def _reading_s(self, tokens: int, step_s: float) -> float:
        """Return how long it takes to read ``tokens``."""
        part = min(tokens, self._most_read(step_s))
        return self._drafter.reading.seconds(part) * tokens / part

    def _most_read(self, step_s: float) -> int:
        """Return how many tokens are read in the time of a step."""
        count = _LEAST_READ
        while self._drafter.reading.seconds(2 * count) <= step_s and count < 1024:
            count *= 2
        return count

    def _explore(self, candidates: Sequence[_Candidate]) -> None:
        """Draft for a sequence without using the draft, if enough time was saved up for that; the next time, another.

        It learns whether drafts for this sequence pay by now.
        """
        one = candidates[self._explored % len(candidates)]
        # Some of it may have been read in this step.
        missing = self._missing(one.sequence)
        cost_s = self._drafter.reading.seconds(min(missing, _LEAST_READ)) + self._drafter.costs.seconds(1)
        if self._savings.seconds < cost_s:
            return
        before = self._drafter.seconds
        if missing > READ_AT_ONCE:
            self._drafter.read(one.sequence.sequence_id, one.sequence.tokens, _LEAST_READ)
        else:
            self._explored += 1
            drafts: list[Draft | None] = [None] * (one.place + 1)
            self._propose(drafts, [(one, min(_EXPLORED_TOKENS, one.most))])
            self._drafter.keep(one.sequence.sequence_id, len(one.sequence.tokens))
        self._savings.seconds -= self._drafter.seconds - before

    def _propose(self, drafts: list[Draft | None], chosen: Sequence[tuple[_Candidate, int]]) -> None:
        proposed = self._drafter.propose([one.asked for one, _ in chosen], [length for _, length in chosen])
        for (one, _), tokens in zip(chosen, proposed, strict=True):
            matching = one.sequence.matching
            count = len(tokens) if matching is None else matching.count_matching(tokens)
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
        # The tokens of the last step; None if it was none of these.
        self._before: int | None = None
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
            self._model.start_step(len(parts), self._before)
        equal = limits.layout is KvLayout.SPLIT and len(parts) > 1
        least = self._least_probability(len(parts))
        explores = self._steps % _EXPLORES_EVERY < (1 if self._explored else 2)
        is_idle = least > 1 and self._model is None and not explores
        if is_idle or not (self._always or self._costs.knows(len(parts))):
            return parts
        each = min(budget.each, budget.total // len(parts) if equal else budget.total)
        drafts: list[Draft | None] = []
        for part in parts:
            drafts.append(self._draft_of(part, each, limits, 0.0 if explores else least))
            if equal and drafts[-1] is None and self._model is None:
                return parts
        if self._model is not None and not explores:
            draftable = [Draftable(part.sequence, _most(part, each, limits)) for part in parts]
            self._model.add(drafts, draftable, budget.total, equal=equal)
        seconds = self._costs.seconds if self._model is None else self._model.seconds
        survivals = [
            part.sequence.drafter.acceptance.survivals(draft) if draft is not None and part.sequence.drafter else ()
            for part, draft in zip(parts, drafts, strict=True)
        ]
        most = self._explored if explores else budget.total
        if equal and None in drafts:
            lengths = [0] * len(parts)
        elif equal:
            lengths = [_equal_length(survivals, most, None if self._always or explores else seconds)] * len(parts)
        elif self._always or explores:
            lengths = _fill(survivals, most)
        else:
            lengths = best_lengths(survivals, most, seconds)
        drafting = [
            part if draft is None or not length else part.with_draft(Draft(draft.tokens[:length], draft.kind))
            for part, draft, length in zip(parts, drafts, lengths, strict=True)
        ]
        if self._model is not None:
            self._model.forget_unused(drafting)
        return drafting

    def learn(self, parts: Sequence[Part], result: StepResult) -> None:
        """Learn from a step over ``parts``."""
        tokens = len(parts) + (0 if result.drafts is None else sum(result.drafts.drafted))
        seconds = result.timings.total_ns / 1e9
        if self._model is not None:
            new = sum(len(part.sequence.tokens) - part.start - 1 for part in parts)
            seconds = self._model.end_step(seconds, len(parts), tokens, new)
        if tokens == self._before:
            self._costs.observe(tokens, seconds)
        else:
            self._costs.observe_change(tokens, seconds)
        self._before = tokens
        for part in parts:
            if part.sequence.drafter is not None:
                part.sequence.drafter.acceptance.observe(part.sequence.tokens[part.start + 1 :])

    def pause(self) -> None:
        """Know that the next step follows one that was not chosen here."""
        self._before = None

    @property
    def _explored(self) -> int:
        """Return how many draft tokens to try: every other time none, so that steps without drafts are known too.

        There are two of these then, since the first one is another size than the step before.
        """
        times = self._steps // _EXPLORES_EVERY
        return 0 if times % 2 else 1 + times // 2 % _MOST_EXPLORED

    def _least_probability(self, sequences: int) -> float:
        """Return the probability that a single draft token needs to be worth its time."""
        if self._always:
            return 0.0
        longer = log(self._costs.seconds(sequences + 1) / self._costs.seconds(sequences))
        return expm1(max(0.0, sequences * longer))

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


def _equal_length(survivals: Sequence[Sequence[float]], most: int, seconds: Seconds | None) -> int:
    """Return the best length for the drafts of all. ``seconds``: of steps; None if time does not count."""
    length = min(min(map(len, survivals)), most // len(survivals))
    if seconds is None:
        return length
    slots = [sum(column) for column in zip(*map(gains, survivals), strict=False)][:length]
    return best_count(slots, len(survivals), seconds, tokens_each=len(survivals))


def _fill(survivals: Sequence[Sequence[float]], most: int) -> list[int]:
    """Return the lengths of whole drafts, one after another, together at most ``most``."""
    lengths = []
    for row in survivals:
        lengths.append(min(len(row), most))
        most -= lengths[-1]
    return lengths
