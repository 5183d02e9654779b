"""The parameters of a sequence."""

from dataclasses import dataclass

from caravan_shard.constraints.grammar import Grammar
from caravan_shard.constraints.thought import Thought
from caravan_shard.sampling.parameters import SamplingParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceParameters:
    """The parameters of one sequence.

    ``prompt_length``: tokens [0, prompt_length) are the client's prompt.
    ``max_length``: the sequence ends when prompt and output together have so many tokens.
    ``ignore_eos``: end-of-generation tokens do not end the sequence. With a grammar they are not sampled either, unless
    the grammar allows nothing else.
    ``stop_token_ids``: the sequence ends when one of these is sampled, even where its grammar is not complete.
    ``min_tokens``: before so many output tokens, neither end-of-generation tokens nor ``stop_token_ids`` are sampled,
    unless the grammar allows nothing else. A grammar that is complete ends the sequence whatever ``min_tokens`` is.
    ``adapter``: one of `ModelFacts.adapters`; empty for none.
    ``prompt_logprobs``: return the log probabilities of the prompt's tokens.
    ``grammar``: the output matches it, or the answer if the output begins with a ``thought``.
    ``max_draft_tokens``: most draft tokens of the sequence in a step. ``predicted``: what the client expects the output
    to be, for drafts. ``draft_pool``: sequences with an equal one may draft from each other's outputs; empty for none.
    None of these changes the output.
    ``traceparent``: the span of the request as W3C Trace Context writes it; empty if the request is not traced.
    """

    sampling: SamplingParameters
    prompt_length: int
    max_length: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    adapter: str = ""
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    thought: Thought | None = None
    max_draft_tokens: int = 0
    predicted: tuple[int, ...] = ()
    draft_pool: bytes = b""
    traceparent: str = ""

    @property
    def trace_id(self) -> str:
        """The id of the trace, which a valid ``traceparent`` has behind its version; empty without one."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether the span of the request is recorded: the lowest bit of the flags at the end of ``traceparent``."""
        return self.traceparent[-1:] in set("13579bdf")

    def prompt_logprob_count(self, start: int, count: int) -> int:
        """Return how many of the ``count`` tokens from ``start`` on have prompt logprobs. These are the first ones."""
        return max(0, min(count, self.prompt_length - start)) if self.prompt_logprobs else 0
