"""How long steps and copies of a shard take, learnt from the steps and copies themselves."""

from dataclasses import dataclass, field

# Attention costs more with every chunk of a long prompt: the last steps say most about the next.
_NEWEST_CHUNK = 0.5
_NEWEST_DECODE = 0.2
# A step with a chunk may measure no slower than one without; a chunk is never free.
_LEAST_TOKEN_S = 1e-6
# The guess before the first chunk: a small model on a CPU.
_FIRST_TOKEN_S = 1e-3
# The guess before the first copy: 1,000 cells of a small model in 6 ms.
_FIRST_CELL_S = 6e-6
_NEWEST_COPY = 0.3


@dataclass(slots=True)
class StepCost:
    """Seconds of a step = seconds of its decodes alone + seconds per prompt token x prompt tokens.

    Both are moving averages. The decodes' part is taken from steps without prompts, however many sequences decoded
    then: its error ends up in the other part, and the sum stays right.
    """

    _decode_s: float = 0.0
    _token_s: float | None = None

    def observe_decode(self, seconds: float) -> None:
        """Learn from a step that carried decodes only."""
        weight = _NEWEST_DECODE if self._decode_s else 1.0
        self._decode_s += weight * (seconds - self._decode_s)

    def observe_chunk(self, tokens: int, seconds: float) -> None:
        """Learn from a step that carried ``tokens`` > 0 prompt tokens."""
        measured = max(_LEAST_TOKEN_S, (seconds - self._decode_s) / tokens)
        self._token_s = (
            measured if self._token_s is None else self._token_s + _NEWEST_CHUNK * (measured - self._token_s)
        )

    @property
    def token_s(self) -> float | None:
        """Seconds to compute a prompt token; None before the first chunk."""
        return self._token_s

    def tokens_within(self, seconds: float) -> int | None:
        """Return how many prompt tokens fit a step of ``seconds``, possibly 0; None before the first chunk."""
        if self._token_s is None:
            return None
        return max(0, int((seconds - self._decode_s) / self._token_s))


@dataclass(slots=True)
class ShardCosts:
    """Costs of one shard: steps with prompts alone, steps with decodes in them, and copies out of the cache or back."""

    prefill_alone: StepCost = field(default_factory=StepCost)
    beside_decodes: StepCost = field(default_factory=StepCost)
    # Seconds to copy a cell out of the cache, or back.
    copy_cell_s: float = _FIRST_CELL_S

    @property
    def recompute_token_s(self) -> float:
        """Seconds to compute a token again."""
        return self.prefill_alone.token_s or self.beside_decodes.token_s or _FIRST_TOKEN_S

    def observe_copy(self, cells: int, seconds: float) -> None:
        """Learn from a copy of ``cells`` in one direction."""
        if cells:
            self.copy_cell_s += _NEWEST_COPY * (seconds / cells - self.copy_cell_s)
