"""How long a pass takes as a function of its tokens, learnt from the passes themselves."""

from dataclasses import dataclass

# Weight of what was known before, per pass: about the last 30 passes count.
_DECAY = 0.97


@dataclass(slots=True)
class StepCost:
    """Seconds of a pass = base + per_token x tokens, by least squares over the recent passes (exponentially weighted).

    A straight line is crude (kernels have steps, attention grows with the context), but the recent passes are the ones
    most like the next.
    """

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_tokens: float = 0.0
    _tokens_seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn that a pass over ``tokens`` > 0 took ``seconds`` > 0."""
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._tokens_tokens = self._tokens_tokens * _DECAY + tokens * tokens
        self._tokens_seconds = self._tokens_seconds * _DECAY + tokens * seconds

    def tokens_within(self, seconds: float) -> int | None:
        """Tokens of a pass that should take ``seconds``; None before the first observation, 0 if one is too many."""
        if not self._weight:
            return None
        mean_tokens = self._tokens / self._weight
        mean_seconds = self._seconds / self._weight
        variance = self._tokens_tokens / self._weight - mean_tokens**2
        covariance = self._tokens_seconds / self._weight - mean_tokens * mean_seconds
        # All passes of one size, or noise that says more tokens cost less: a line through the origin.
        sloped = variance > 0.05 * mean_tokens**2 and covariance > 0
        per_token = covariance / variance if sloped else mean_seconds / mean_tokens
        base = mean_seconds - per_token * mean_tokens
        return max(0, int((seconds - base) / per_token))
