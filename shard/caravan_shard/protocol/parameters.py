"""What the router says about a sequence besides its tokens."""

from dataclasses import dataclass

from caravan_shard.constraints.grammar import Grammar
from caravan_shard.sampling.parameters import SamplingParameters


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
