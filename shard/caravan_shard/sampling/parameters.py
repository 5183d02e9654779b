"""How the tokens of a sequence are chosen."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Biases:
    """Columns: ``values[n]`` is added to the logit of token ``ids[n]``. No id occurs twice."""

    ids: NDArray[np.intp]
    values: NDArray[np.float32]

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change ``logits`` [vocabulary] in place."""
        logits[self.ids] += self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen; a field at its default switches its part off.

    The order, of which a new parameter gets its place:

    1. ``biases`` are added to the logits.
    2. Penalties, on the last ``repeat_last_n`` tokens of prompt and output (0: none; None: all). As in llama.cpp the
       window counts prompt and output. As in vLLM ``repetition_penalty`` applies to all tokens in it, while
       ``frequency_penalty`` and ``presence_penalty`` count those of the output alone.
    3. DRY: see `caravan_shard.sampling.dry`.
    4. The tokens that a grammar or ``min_tokens`` rule out are removed.
    5. A ``temperature`` of 0 chooses the most likely token. Otherwise the logits are divided by it, so that the filters
       see the distribution that is drawn from, as in TGI and vLLM. llama-server applies the temperature last.
    6. The filters top_k, typical_p, top_p and min_p, each on what the one before left.
    7. XTC, the last filter as in llama-server: with probability ``xtc_probability``, of the tokens that are at least
       ``xtc_threshold`` likely, only the least likely is kept.
    8. The draw with the number of (seed, position).

    Mirostat and adaptive-p are not built. They carry a value from token to token (mirostat's mu) that cannot be rebuilt
    from the tokens, so a sequence that is computed again or resumed on another shard would lose it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    typical_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    logprobs: bool = False
    top_n_tokens: int = 0
    biases: Biases | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1

    @property
    def filters(self) -> bool:
        """Whether a filter may take candidates away."""
        return (
            self.top_k > 0 or self.typical_p < 1.0 or self.top_p < 1.0 or self.min_p > 0.0 or self.xtc_probability > 0.0
        )
