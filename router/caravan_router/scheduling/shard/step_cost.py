"""How long a pass takes as a function of its prompt tokens, learnt from the passes themselves."""

from dataclasses import dataclass

# Attention costs more with every chunk of a long prompt: the last passes tell most about the next.
_NEWEST_CHUNK = 0.5
_NEWEST_DECODE = 0.2
# A pass with a chunk may measure no slower than one without; a chunk is never free.
_LEAST_TOKEN_S = 1e-6


@dataclass(slots=True)
class StepCost:
    """Seconds of a pass = seconds of its decodes alone + seconds per prompt token x prompt tokens.

    Both are moving averages. The decodes' part is taken from passes without prompts, however many ran then: what that
    gets wrong ends up in the other part, and the sum stays right.
    """

    _decode_s: float = 0.0
    _token_s: float | None = None

    def observe_decode(self, seconds: float) -> None:
        """Learn from a pass that carried decodes only."""
        weight = _NEWEST_DECODE if self._decode_s else 1.0
        self._decode_s += weight * (seconds - self._decode_s)

    def observe_chunk(self, tokens: int, seconds: float) -> None:
        """Learn from a pass that carried ``tokens`` > 0 of prompts."""
        measured = max(_LEAST_TOKEN_S, (seconds - self._decode_s) / tokens)
        self._token_s = (
            measured if self._token_s is None else self._token_s + _NEWEST_CHUNK * (measured - self._token_s)
        )

    @property
    def token_s(self) -> float | None:
        """Seconds to compute a prompt token; None before the first chunk."""
        return self._token_s

    def tokens_within(self, seconds: float) -> int | None:
        """Prompt tokens that fit a pass of ``seconds``; None before the first chunk, 0 if one is too many."""
        if self._token_s is None:
            return None
        return max(0, int((seconds - self._decode_s) / self._token_s))
