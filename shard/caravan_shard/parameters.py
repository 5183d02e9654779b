"""What the router says about a sequence besides its tokens."""

from dataclasses import dataclass

from caravan_shard.biases import Biases
from caravan_shard.constraints.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How tokens are chosen; a field at its default switches its filter off.

    Order: biases, penalties, what a grammar allows, temperature, top_k, typical_p, top_p, min_p. ``temperature`` 0
    chooses the most likely token.
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

    @property
    def penalizes(self) -> bool:
        """Some penalty is on."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def filters(self) -> bool:
        """Some filter may take candidates away."""
        return self.top_k > 0 or self.typical_p < 1.0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParameters:
    """Tokens [0, prompt_length) are the client's prompt; the sequence ends at ``max_length`` tokens in all.

    ``adapter`` is a name of ModelFacts; empty for none. ``prompt_logprobs``: the log probabilities of the prompt's
    tokens are told.
    What it says matches ``grammar``, if there is one.
    """

    sampling: SamplingParameters
    prompt_length: int
    max_length: int
    ignore_eos: bool = False
    adapter: str = ""
    prompt_logprobs: bool = False
    grammar: Grammar | None = None

    def told_tokens(self, start: int, count: int) -> int:
        """How many of ``count`` tokens from ``start`` on have their log probabilities told: the first ones."""
        return max(0, min(count, self.prompt_length - start)) if self.prompt_logprobs else 0
