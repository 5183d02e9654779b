"""How a generation samples and stops. Values are valid: the HTTP layer checks them, and nobody checks them again."""

from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended; the values are TGI's words."""

    LENGTH = "length"
    EOS_TOKEN = "eos_token"
    STOP_SEQUENCE = "stop_sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. A filter at its default is off.

    Order: biases, penalties, temperature, top_k, typical_p, top_p, min_p. ``temperature`` 0 is greedy.
    ``repetition_penalty`` counts tokens of prompt and output, ``frequency_penalty`` and ``presence_penalty`` count
    those of the output alone, as in vLLM. ``biases``: pairs of a token id and what is added to its logit; ids are
    unique.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends on the shard. Stop strings are text: the text layer looks for them."""

    max_new_tokens: int
    ignore_eos: bool = False
