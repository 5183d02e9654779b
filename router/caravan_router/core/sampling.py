"""How a generation samples and stops. Values are valid: the HTTP layer checks them, and nobody checks them again."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended. The values are TGI's words, except STOP_TOKEN's: TGI has no stop tokens."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; a field at its default switches its part off.

    Order: biases, penalties, DRY, the constraint, temperature, top_k, typical_p, top_p, min_p, XTC. A ``temperature``
    of 0 chooses the most likely token before any filter. ``caravan_shard.sampling.parameters`` explains each part.

    ``biases``: pairs of a token id, each once, and the value that is added to its logit.
    ``repetition_penalty`` applies to tokens of prompt and output, ``frequency_penalty`` and ``presence_penalty`` count
    occurrences in the output alone, as in vLLM. All three look at the last ``repeat_last_n`` tokens of prompt and
    output; 0 switches them off, None is all tokens.
    ``dry_penalty_last_n``: DRY looks at so many tokens of prompt and output; 0 switches it off, None is all tokens.
    """

    temperature: float = 1.0
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
    biases: tuple[tuple[int, float], ...] = ()
    repeat_last_n: int | None = None
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends on the shard. Stop strings are text: the text layer looks for them.

    ``stop_token_ids``: at most `caravan_proto.limits.MAX_STOP_TOKEN_IDS` ids that end the sequence when sampled.
    ``min_tokens``: the least number of output tokens before an end token or one of ``stop_token_ids`` can be sampled;
    at most ``max_new_tokens``. A constraint that allows nothing else prevails.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
