"""How long steps and copies of a shard take, learnt from the steps and copies themselves."""

from dataclasses import dataclass, field, replace

from caravan_scheduler.shard.cost_curve import CostCurve

# Each chunk makes what earlier ones tell about attention count less.
_KEPT = 0.98
# As it comes, llama.cpp's flash attention on CPUs computes 64 prompt tokens of a sequence at a time, and fewer one by
# one: each then takes up to ten times as long for its context. With split cells, the first token of a chunk rides with
# the decodes.
FAST_CHUNK_TOKENS = 72
# The guess before such chunks were measured.
_FAST_SHARE = 0.25
# The other way round, small chunks are taken for as slow as they can be until one was measured.
_SLOWEST_SMALL = 10.0
# Before any was measured behind a context: a token spends so much of its own time on each token of its context.
_FIRST_PAIR_SHARE = 1 / 2500
# The standard deviation of the contexts, in tokens, from which on they show what a longer context costs.
_LEAST_SPREAD = 50.0
_NEWEST_CHUNK = 0.3
_NEWEST_DECODE = 0.2
_NEWEST_STEP = 0.05
# The first guess: reading the weights takes as long as decoding this many more sequences.
_WEIGHTS_AS_SEQUENCES = 4.0
# Tokens of the first chunk, and of later ones until this many were measured: fewer while sequences decode.
_FIRST_CHUNK_TOKENS = 128
_FIRST_CHUNK_BESIDE_DECODES = 32
# Beyond that, a chunk is at most this multiple of the largest that was measured.
_GROWTH = 4
# A sequence is computed again in chunks of about this size.
_RECOMPUTED_CHUNK_TOKENS = 256
# The guess before the first chunk: a small model on a CPU.
_FIRST_TOKEN_S = 1e-3
# The guess before the first copy: 1,000 cells of a small model in 6 ms, and a recurrent state in 2.
_FIRST_CELL_S = 6e-6
_FIRST_STATE_S = 2e-3
_NEWEST_COPY = 0.3


@dataclass(slots=True)
class AttentionCost:
    """Seconds that a token of context adds to each token of a chunk: the slope of a regression that forgets."""

    # None before contexts differed enough to tell.
    pair_s: float | None = None
    # The means of the chunks: their context, and the seconds of their tokens.
    context: float = 0.0
    mean_token_s: float = 0.0
    _weight: float = 0.0
    _variance: float = 0.0
    _covariance: float = 0.0

    def observe(self, tokens: int, context: float, seconds: float, *, plain_s: float) -> None:
        """Learn from a chunk of ``tokens`` behind ``context`` tokens that took ``seconds``.

        If it is the first, it counts as if another without context had taken ``plain_s``, unless that is 0.
        """
        if not self._weight and plain_s:
            self._add(tokens, 0.0, plain_s)
        self._add(tokens, context, seconds)
        if self._variance > _LEAST_SPREAD**2:
            # A token without context costs something, too.
            most = max(0.0, self.mean_token_s / self.context)
            self.pair_s = min(max(0.0, self._covariance / self._variance), most)

    def _add(self, tokens: int, context: float, seconds: float) -> None:
        self._weight = _KEPT * self._weight + tokens
        gain = tokens / self._weight
        context_change, token_change = context - self.context, seconds / tokens - self.mean_token_s
        self.context += gain * context_change
        self.mean_token_s += gain * token_change
        self._variance = (1 - gain) * (self._variance + gain * context_change**2)
        self._covariance = (1 - gain) * (self._covariance + gain * context_change * token_change)


@dataclass(slots=True)
class AttentionCosts:
    """The cost of attention in chunks below, and from, FAST_CHUNK_TOKENS."""

    _small: AttentionCost = field(default_factory=AttentionCost)
    _fast: AttentionCost = field(default_factory=AttentionCost)

    @property
    def knows_small(self) -> bool:
        """Whether small chunks behind a context were measured."""
        return self._small.pair_s is not None

    def observe(self, tokens: int, context: float, seconds: float, *, plain_s: float) -> None:
        """Learn from a chunk: see `AttentionCost.observe`."""
        (self._fast if tokens >= FAST_CHUNK_TOKENS else self._small).observe(tokens, context, seconds, plain_s=plain_s)

    def token_s(self, tokens: int, context: float) -> float:
        """Return the seconds that each token of a chunk of ``tokens`` spends on ``context``, as far as is known."""
        small_s, fast_s = self._small.pair_s, self._fast.pair_s
        if tokens >= FAST_CHUNK_TOKENS:
            return context * (fast_s if fast_s is not None else _FAST_SHARE * (small_s or 0.0))
        return context * (small_s if small_s is not None else fast_s or 0.0)

    def copy(self) -> "AttentionCosts":
        """Return costs that start from what these have learnt."""
        return AttentionCosts(replace(self._small), replace(self._fast))

    def cautious_small_s(self, context: float) -> float:
        """Return what each token of a small chunk spends on ``context``, which is a guess until some were measured.

        They are then as slow as they can be, but for the context that measured ones had, whatever that took.
        """
        known_s = self.token_s(1, context)
        if self.knows_small:
            return known_s
        fast_s = self._fast.pair_s if self._fast.pair_s is not None else _FIRST_PAIR_SHARE * self._small.mean_token_s
        return known_s + (_SLOWEST_SMALL - 1) * fast_s * max(0.0, context - self._small.context)


@dataclass(slots=True)
class LayoutCosts:
    """What was learnt of steps in one layout of the cells."""

    decodes: CostCurve = field(default_factory=lambda: CostCurve(newest=_NEWEST_DECODE, fixed=_WEIGHTS_AS_SEQUENCES))
    alone: CostCurve = field(default_factory=lambda: CostCurve(newest=_NEWEST_CHUNK))
    beside_decodes: CostCurve = field(default_factory=lambda: CostCurve(newest=_NEWEST_CHUNK))
    attention: AttentionCosts = field(default_factory=AttentionCosts)

    def as_guess(self) -> "LayoutCosts":
        """Return costs of another layout, which start from these."""
        other = LayoutCosts(attention=self.attention.copy())
        for known, guessed in (
            (self.decodes, other.decodes),
            (self.alone, other.alone),
            (self.beside_decodes, other.beside_decodes),
        ):
            if known.is_known:
                guessed.guess_from(known)
        return other


@dataclass(slots=True)
class ShardCosts:
    """Seconds of a step = seconds of its decodes + seconds of its prompt tokens; and the cost of copies.

    Seconds of prompt tokens = what a table has for their number + what attention takes for their context. There is a
    table for steps with decodes and one for steps without: beside decodes, the weights are read anyway. Errors of the
    other parts end up in the table, and the sum stays right. Each layout of the cells has tables of its own.
    """

    _learnt: LayoutCosts = field(default_factory=LayoutCosts)
    # What was learnt in the other layout; None before the cells had it.
    _of_other_layout: LayoutCosts | None = None
    # Seconds to copy a cell out of the cache, or back.
    copy_cell_s: float = _FIRST_CELL_S
    # The same of a recurrent state.
    copy_state_s: float = _FIRST_STATE_S
    # Seconds of a step on average, whatever it carries; 0 before the first.
    mean_step_s: float = 0.0

    def change_layout(self) -> None:
        """Note that the cells have the other layout, in which steps take another time.

        The first time, what was learnt in this one is where learning starts, and all of it is in doubt.
        """
        other = self._of_other_layout or self._learnt.as_guess()
        self._learnt, self._of_other_layout = other, self._learnt

    def observe_step(self, seconds: float) -> None:
        """Learn from a step, whatever it carried."""
        self.mean_step_s += (_NEWEST_STEP if self.mean_step_s else 1.0) * (seconds - self.mean_step_s)

    def observe_decodes(self, sequences: int, seconds: float) -> None:
        """Learn from a step in which ``sequences`` decoded and nothing else."""
        if sequences:
            self._learnt.decodes.observe(sequences, seconds)

    def observe_chunks(self, tokens: int, context: float, *, riders: int, seconds: float) -> None:
        """Learn from a step with ``tokens`` > 0 of prompts, behind ``context`` tokens on average."""
        curve, other = self._learnt.alone, self._learnt.beside_decodes
        if riders:
            curve, other = other, curve
        if other.is_known and not curve.is_known:
            curve.guess_from(other)
        decode_s = self.decode_s(riders)
        self._learnt.attention.observe(tokens, context, seconds - decode_s, plain_s=curve.seconds(tokens))
        attention_s = tokens * self._learnt.attention.token_s(tokens, context)
        curve.observe(tokens, seconds - decode_s - attention_s, beside_s=decode_s + attention_s)

    def seconds(self, tokens: int, *, riders: int, context: int) -> float:
        """Return the expected seconds of a step with ``tokens`` of prompts behind ``context`` tokens."""
        attention_s = tokens * self._learnt.attention.token_s(tokens, context)
        return self.decode_s(riders) + self._prompts(riders).seconds(tokens) + attention_s

    def fast_attention_gain(self, *, riders: int, context: int) -> float:
        """Return how many times as long a chunk of FAST_CHUNK_TOKENS would take with the attention of smaller ones."""
        fast_s = self.seconds(FAST_CHUNK_TOKENS, riders=riders, context=context)
        slower_s = self._learnt.attention.token_s(1, context) - self._learnt.attention.token_s(
            FAST_CHUNK_TOKENS, context
        )
        return (fast_s + FAST_CHUNK_TOKENS * slower_s) / fast_s

    def decode_s(self, sequences: int) -> float:
        """Return the expected seconds of a step in which ``sequences`` decode; 0 before the first."""
        return self._learnt.decodes.seconds(sequences)

    def tokens_within(self, seconds: float, *, riders: int, context: int, remaining: int | None = None) -> int:
        """Return how many prompt tokens behind ``context`` tokens fit a step of ``seconds`` beside ``riders``.

        ``remaining``: how many the prompt has left, None if that is not known. Other prompts may take what it leaves. A
        chunk much larger than any before is a guess, so sizes grow by steps.
        """
        curve, most = self._prompts(riders), self.most_tokens(riders)
        if not curve.is_known:
            return most
        left_s = seconds - self.decode_s(riders)
        small = min(most, curve.size_within(left_s, self._learnt.attention.cautious_small_s(context)))
        if remaining is not None and remaining < FAST_CHUNK_TOKENS:
            return small
        fast = min(most, curve.size_within(left_s, self._learnt.attention.token_s(FAST_CHUNK_TOKENS, context)))
        return fast if fast >= FAST_CHUNK_TOKENS else min(small, FAST_CHUNK_TOKENS - 1)

    @property
    def knows_small_chunks(self) -> bool:
        """Whether it was measured what small chunks take behind a context."""
        return self._learnt.attention.knows_small

    def doubt(self, tokens: int, *, riders: int) -> float:
        """Return how far the cost of ``tokens`` of prompts beside ``riders`` is a guess, from 0 to 1."""
        return (self._learnt.beside_decodes if riders else self._learnt.alone).doubt(tokens)

    def most_tokens(self, riders: int) -> int:
        """Return the largest number of prompt tokens whose cost can be guessed."""
        first = _FIRST_CHUNK_BESIDE_DECODES if riders else _FIRST_CHUNK_TOKENS
        return max(first, _GROWTH * self._prompts(riders).largest_measured)

    @property
    def recompute_token_s(self) -> float:
        """Seconds to compute a token again."""
        return self.prompt_token_s or _FIRST_TOKEN_S

    def recompute_s(self, start: int, end: int) -> float:
        """Seconds to compute the tokens from ``start`` to ``end`` again."""
        return (end - start) * (
            self.recompute_token_s + self._learnt.attention.token_s(_RECOMPUTED_CHUNK_TOKENS, (start + end) / 2)
        )

    @property
    def prompt_token_s(self) -> float:
        """Seconds of a token in a chunk of a prompt; 0 before the first was measured."""
        return self._prompts(0).seconds(_RECOMPUTED_CHUNK_TOKENS) / _RECOMPUTED_CHUNK_TOKENS

    def _prompts(self, riders: int) -> CostCurve:
        """Return what is known of prompts beside ``riders``, or else of others."""
        known = self._learnt
        curve, other = (known.beside_decodes, known.alone) if riders else (known.alone, known.beside_decodes)
        return curve if curve.is_known or not other.is_known else other

    def copy_s(self, cells: int, *, states: int) -> float:
        """Return the expected seconds of a copy of ``cells`` and recurrent ``states`` in one direction."""
        return cells * self.copy_cell_s + states * self.copy_state_s

    def observe_copy(self, cells: int, seconds: float, *, states: int = 0) -> None:
        """Learn from a copy in one direction. What was expected to take more of the time learns more."""
        if not cells and not states:
            return
        expected_s = self.copy_s(cells, states=states)
        change = _NEWEST_COPY * (seconds / expected_s - 1)
        cells_share = cells * self.copy_cell_s / expected_s
        self.copy_cell_s *= 1 + change * cells_share
        self.copy_state_s *= 1 + change * (1 - cells_share)
