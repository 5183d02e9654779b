"""What the router's rules need to know of an executor's model."""

from caravan.limits import MAX_STOPS
from caravan_dialects.api.limits import Limits
from caravan_scheduler.core.engine import ModelFacts
from caravan_shard.backends.base import Backend

LIMITS = Limits(max_stop_sequences=MAX_STOPS)


def model_facts(backend: Backend, *, max_tokenize_bytes: int = 0) -> ModelFacts:
    """Return what the rules of sampling, stopping and prompts look at; the rest is not filled in.

    ``max_tokenize_bytes``: of a text; only prompts of messages need it.
    """
    facts, current = backend.facts, backend.capacity.current
    return ModelFacts(
        name=facts.name,
        fingerprint=facts.fingerprint,
        vocabulary_size=facts.vocabulary_size,
        chat_template=facts.chat_template,
        bos_text=facts.bos_text,
        eos_text=facts.eos_text,
        max_sequence_tokens=current.cells_per_sequence,
        max_top_n_tokens=0,
        max_tokenize_bytes=max_tokenize_bytes,
        total_cells=current.cells,
    )
