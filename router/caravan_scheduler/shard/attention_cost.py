"""What attention to their context adds to the tokens of a chunk, learnt from chunks that come one at a time."""

from dataclasses import dataclass, field, replace

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
