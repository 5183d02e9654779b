"""The parameters that a shard gets with the first chunk of a sequence's stay."""

import hashlib

from caravan_proto.messages.commands import SequenceParameters
from caravan_scheduler.sequence import Sequence

_POOL_BYTES = 16


def parameters_of(sequence: Sequence) -> SequenceParameters:
    """Return the parameters for the next stay of ``sequence``."""
    spec = sequence.spec
    drafts = spec.max_draft_tokens > 0
    return SequenceParameters(
        sampling=spec.sampling,
        prompt_length=len(spec.prompt),
        max_length=spec.max_length,
        ignore_eos=spec.stopping.ignore_eos,
        stop_token_ids=spec.stopping.stop_token_ids,
        min_tokens=spec.stopping.min_tokens,
        adapter=spec.adapter,
        prompt_logprobs=sequence.needs_prompt_logprobs,
        constraint=spec.constraint,
        thought=spec.thought,
        max_draft_tokens=spec.max_draft_tokens,
        prediction=spec.prediction if drafts else (),
        draft_pool=hashlib.blake2b(spec.namespace.encode(), digest_size=_POOL_BYTES).digest() if drafts else b"",
        traceparent=spec.traceparent,
        feedback=sequence.feedback,
    )
